"""The inputs and outputs of a routing decision. Frozen data only: no clock, no I/O, no torch, no Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvcache.hashing import BlockKey
from replicas.engine_config import Role
from replicas.request import TraceContext

RECENT_WORK_S = 900.0
"""Time constant of `ReplicaSnapshot.recent_work_s`: about the lifetime of a cached block, since this work is what fills caches, and
short enough to forget the load of the night before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """What the router knows about a request: its size, its prefix and its rights, never its text."""

    request_id: str
    model: str
    num_prompt_tokens: int
    max_tokens: int
    """Output tokens that it may generate, all choices together."""
    block_keys: tuple[BlockKey, ...] = ()
    """Keys of the prompt's full blocks, from `kvcache.hashing.block_keys`."""
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
    """Whether it was present when replicas died: nothing else may run on its replica."""
    is_whole: bool = False
    """Whether one replica must compute it from the first token to the last, never a pair."""
    caller: str = ""
    """The gateway that sent it; when the gateway's lease expires the request is cancelled."""
    trace_context: TraceContext = TraceContext()


class ReplicaLoad(NamedTuple):
    """The part of a replica's statistics that policies use. Names and meanings are those of `replicas.stats.ReplicaStats`.

    A tuple, like `ReplicaSnapshot`: a frozen dataclass of all the counters takes ten times as long to make.
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
    urgent_tokens_per_s: float | None = None


class LoadBehind(NamedTuple):
    """The part of a replica's load that is less urgent than a request: its prompts are computed later, its decodes step aside, and its
    slots and blocks are taken if there are no others."""

    num_running: int = 0
    num_waiting: int = 0
    num_uncomputed_tokens: int = 0
    num_context_tokens: int = 0
    num_booked_requests: int = 0
    num_booked_prefill_tokens: int = 0
    num_booked_context_tokens: int = 0


class ReplicaSnapshot(NamedTuple):
    """One candidate as the policy sees it: its last report and everything booked on it since.

    A tuple, because every decision makes several: a frozen dataclass takes more than twice as long to make.
    """

    replica_id: str
    stats: ReplicaLoad
    max_num_seqs: int
    block_size: int
    num_cached_blocks: int = 0
    """Leading blocks of this request's prompt that the replica reported as cached."""
    num_pending_blocks: int = 0
    """Leading blocks that are cached or that bookings will cache soon: a reason for affinity, not yet a saving."""
    num_booked_requests: int = 0
    """Requests sent to the replica that no report has counted yet."""
    num_booked_prefill_tokens: int = 0
    num_booked_context_tokens: int = 0
    recent_work_s: float = 0.0
    """Seconds of prefill sent there lately, decaying with `RECENT_WORK_S`; under steady load, `RECENT_WORK_S` times the utilization.
    It balances replicas even while none of them has a queue."""
    recent_work_scale: float = 1.0
    """Factor by which `recent_work_s` was extrapolated for a replica known for a short time; approaches 1."""
    report_age_s: float = 0.0
    role: Role = "unified"
    """The replica's pool."""
    behind: LoadBehind | None = None
    """Of all the load above, the part that is less urgent than the request; None: nothing."""

    @property
    def without_behind(self) -> ReplicaSnapshot:
        """The replica as the request meets it: less urgent load is not there, and prompts are computed faster by as much as the decodes
        that step aside are of all."""
        behind = self.behind
        if behind is None:
            return self
        stats = self.stats
        rate = stats.prefill_tokens_per_s
        if rate and stats.urgent_tokens_per_s and stats.urgent_tokens_per_s > rate and stats.num_running:
            rate += (stats.urgent_tokens_per_s - rate) * min(1.0, behind.num_running / stats.num_running)
        return self._replace(
            stats=stats._replace(
                num_running=max(0, stats.num_running - behind.num_running),
                num_waiting=max(0, stats.num_waiting - behind.num_waiting),
                num_uncomputed_tokens=max(0, stats.num_uncomputed_tokens - behind.num_uncomputed_tokens),
                num_context_tokens=max(0, stats.num_context_tokens - behind.num_context_tokens),
                num_free_blocks=min(stats.num_blocks, stats.num_free_blocks + behind.num_context_tokens // self.block_size),
                prefill_tokens_per_s=rate,
            ),
            num_booked_requests=max(0, self.num_booked_requests - behind.num_booked_requests),
            num_booked_prefill_tokens=max(0, self.num_booked_prefill_tokens - behind.num_booked_prefill_tokens),
            num_booked_context_tokens=max(0, self.num_booked_context_tokens - behind.num_booked_context_tokens),
            behind=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """Replicas that could take the request, in ascending order of id: all of them, or the most promising ones when the policy examines
    only these (`Policy.examines_all`)."""

    now_s: float
    replicas: tuple[ReplicaSnapshot, ...]
    """Replicas that can serve the whole request. Those of the decode pool can also continue from KV of the prefill pool."""
    prefill: tuple[ReplicaSnapshot, ...] = ()
    """Replicas of the prefill pool that may compute the prompt first. Empty without pools, and when one pool is unavailable:
    `replicas` then holds the other pool."""


class CandidateScore(NamedTuple):
    """One candidate's predicted cost and the named terms that add up to it, all in seconds; the lowest cost wins.

    Names and seconds are separate, because thousands of scores are kept to explain decisions and share a few tuples of names.
    """

    replica_id: str
    cost_s: float
    names: tuple[str, ...] = ()
    seconds: tuple[float, ...] = ()
    prefill_replica_id: str | None = None
    """Set for a pair: this replica computes the prompt, and `replica_id` continues."""

    @property
    def terms(self) -> tuple[tuple[str, float], ...]:
        return tuple(zip(self.names, self.seconds, strict=True))


class CandidateLoad(NamedTuple):
    """One candidate's load as seen by a policy that predicts no times."""

    replica_id: str
    num_requests: int
    """Requests in the replica or on their way to it."""
    num_tokens: int
    """Tokens in its KV, waiting to be computed, or on their way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where one request goes, and why."""

    request_id: str
    replica_id: str
    replica_role: Role = "unified"
    """The pool of `replica_id`."""
    prefill_replica_id: str | None = None
    """Set for a pair: this replica of the prefill pool computes the prompt, and `replica_id` continues from its KV."""
    predicted_ttft_s: float | None = None
    num_cached_tokens: int = 0
    """Prompt tokens known to be cached on the replica that computes the prompt."""
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
        """Whether no replica exists, or none ever will: neither the request nor the load is the reason."""
        return self.kind in ("no_replica", "not_served")
