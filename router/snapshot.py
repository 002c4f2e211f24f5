"""What a routing decision is made of, and what it says. Frozen data only: no clock, no I/O, no torch, no Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvcache.hashing import BlockKey
from replicas.engine_config import Role
from replicas.request import TraceContext

RECENT_WORK_S = 900.0
"""Time constant of `ReplicaSnapshot.recent_work_s`: about as long as a cache lives, for what fills it is this work; short
enough to forget a night."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """What the router knows of a request: its size, its prefix and its rights, never its text."""

    request_id: str
    model: str
    num_prompt_tokens: int
    max_tokens: int
    """Output tokens it may take, all choices together."""
    block_keys: tuple[BlockKey, ...] = ()
    """Keys of the prompt's full blocks, as `kvcache.hashing.block_keys` gives them."""
    num_choices: int = 1
    priority: int = 0
    """Smaller is more urgent."""
    tenant: str = "default"
    deadline_s: float | None = None
    """Unix time by which the first token is due."""
    arrival_s: float = 0.0
    attempt: int = 0
    excluded_replicas: frozenset[str] = frozenset()
    """Replicas that already failed this request."""
    is_alone: bool = False
    """It was present when replicas died: nothing else may run where it runs."""
    is_whole: bool = False
    """It must be computed by one replica from its first token on, never by a pair."""
    caller: str = ""
    """The gateway that asks; when its lease expires the request is given up."""
    trace_context: TraceContext = TraceContext()


class ReplicaLoad(NamedTuple):
    """Of a replica's statistics what policies ask for, under the same names (`replicas.stats.ReplicaStats` says what they mean).

    A tuple of these alone, as `ReplicaSnapshot` is one: a frozen dataclass of all the counters takes ten times as long to make.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_uncomputed_tokens: int = 0
    num_context_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    prefill_tokens_per_s: float | None = None
    decode_step_s: float | None = None
    transfer_tokens_per_s: float | None = None


class ReplicaSnapshot(NamedTuple):
    """One candidate as the policy sees it: its last report plus everything booked on it since.

    A tuple, because a decision makes several: a frozen dataclass of as many fields takes more than twice as long to make.
    """

    replica_id: str
    stats: ReplicaLoad
    max_num_seqs: int
    block_size: int
    num_cached_blocks: int = 0
    """Leading blocks of this request's prompt that the replica reported as cached."""
    num_pending_blocks: int = 0
    """Leading blocks that bookings will have cached soon (at least `num_cached_blocks`): affinity, not yet a saving."""
    num_booked_requests: int = 0
    """Requests sent since the last report, or not yet seen in one."""
    num_booked_prefill_tokens: int = 0
    num_booked_context_tokens: int = 0
    recent_work_s: float = 0.0
    """Seconds of prefill sent there lately, decaying with `RECENT_WORK_S`; under a steady load, that times its utilization.
    It keeps replicas even while none of them has a queue."""
    recent_work_scale: float = 1.0
    """By how much that was extrapolated from the time since the replica is known; nears 1 with time."""
    report_age_s: float = 0.0
    role: Role = "unified"
    """Its pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """Replicas that could take the request, in ascending order of id; all of them, unless the policy examines only the
    most promising (`Policy.examines_all`)."""

    now_s: float
    replicas: tuple[ReplicaSnapshot, ...]
    """Those that can do all of it. One of the decode pool can also go on from KV of the prefill pool."""
    prefill: tuple[ReplicaSnapshot, ...] = ()
    """Replicas of the prefill pool that may compute the prompt first. Empty without pools, and when one pool is not to be had:
    what is left of the other is in `replicas` then."""


class CandidateScore(NamedTuple):
    """One candidate's predicted cost and the named terms it is the sum of, all in seconds; the lowest cost is chosen.

    Names and seconds stand apart, because thousands of these are kept to explain decisions, and all share a few tuples of names.
    """

    replica_id: str
    cost_s: float
    names: tuple[str, ...] = ()
    seconds: tuple[float, ...] = ()
    prefill_replica_id: str | None = None
    """Set for a pair: this replica computes the prompt, and `replica_id` goes on."""

    @property
    def terms(self) -> tuple[tuple[str, float], ...]:
        return tuple(zip(self.names, self.seconds, strict=True))


class CandidateLoad(NamedTuple):
    """One candidate as a policy that predicts no times saw it."""

    replica_id: str
    num_requests: int
    """In the replica or on their way to it."""
    num_tokens: int
    """In its KV, waiting to be computed, or on their way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where one request goes, and why."""

    request_id: str
    replica_id: str
    replica_role: Role = "unified"
    """The pool of `replica_id`."""
    prefill_replica_id: str | None = None
    """Set when this replica of the prefill pool computes the prompt first, and `replica_id` takes its KV over."""
    predicted_ttft_s: float | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that were known to be cached on the replica that computes the prompt."""
    candidates: tuple[CandidateScore | CandidateLoad, ...] = ()


RejectionKind = Literal["queue_full", "tenant_limit", "predicted_wait", "no_replica", "not_served"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """The request is not admitted; HTTP 429 (or 503 when no replica exists) with `Retry-After`."""

    request_id: str
    reason: str
    retry_after_s: float
    kind: RejectionKind

    @property
    def is_unavailable(self) -> bool:
        """Nothing is wrong with the request or its number: nobody is there to serve it."""
        return self.kind in ("no_replica", "not_served")
