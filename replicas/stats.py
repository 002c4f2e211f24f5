"""Immutable snapshots that a replica pushes to the router and to metrics. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcache.events import KVEvent
from replicas.engine_config import Role

SMOOTHING = 0.2
"""Weight of a new value in the exponentially weighted means of a replica's statistics."""


def smoothed(mean: float | None, value: float) -> float:
    """The exponentially weighted mean with `value` added; the first value is its own mean."""
    return value if mean is None else mean + SMOOTHING * (value - mean)


class TierLoad(NamedTuple):
    """The requests of one priority in one engine."""

    priority: int
    num_running: int = 0
    num_waiting: int = 0
    num_uncomputed_tokens: int = 0
    num_context_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffStats:
    """KV that one engine offered to other replicas and received from them. All values but `num_leases` only grow."""

    num_leases: int = 0
    """Open leases, under which another replica may read blocks."""
    num_leases_expired: int = 0
    num_offers: int = 0
    num_loads: int = 0
    """Handoffs received completely; bytes and seconds below count only these."""
    num_recomputes: int = 0
    """Handoffs that failed, so that their KV was computed here."""
    num_bytes: int = 0
    """KV bytes received."""
    transfer_s: float = 0.0
    """Seconds in which bytes moved, without the wait for a prefill."""
    overlap_s: float = 0.0
    """The part of `transfer_s` before the prefill ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStats:
    """Drafts of one speculation method. All counts only grow."""

    method: str
    num_passes: int = 0
    """Verifications: steps of a request with at least one draft. Each yields a token besides the accepted drafts."""
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    """Accepted first drafts, second drafts, and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarStats:
    """Grammars that one engine's requests followed. All values only grow."""

    num_compiles: int = 0
    """Grammars compiled, refused ones included."""
    compile_s: float = 0.0
    num_cache_hits: int = 0
    """Requests whose grammar was compiled before."""
    num_refused: int = 0
    num_masks: int = 0
    """Masks computed beside the model; those behind drafts are not counted."""
    mask_s: float = 0.0
    """Seconds of one thread for these masks."""
    num_late_masks: int = 0
    """Masks that took so long that their token was drawn after a later step."""
    num_forced_tokens: int = 0
    """Generated tokens that a grammar left no choice for, appended without a draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """Load and counters of one engine, as of the end of a step. Counters only grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_uncomputed_tokens: int = 0
    """Prompt tokens of waiting and running requests that no step has computed yet."""
    num_context_tokens: int = 0
    """Tokens whose KV running requests hold."""
    tiers: tuple[TierLoad, ...] = ()
    """These four by priority, the most urgent first. At most `replicas.scheduling.tier_loads.MAX_TIERS`: the last one may hold less
    urgent ones too."""
    num_blocks: int = 0
    num_free_blocks: int = 0
    """Not held by any request; may still hold cached prefixes."""
    num_cached_blocks: int = 0
    """Findable by prefix, held or free."""
    prefill_tokens_per_s: float | None = None
    """Measured rate of prompt computation, lower while decodes share the steps (EWMA over steps); None before the first prefill."""
    urgent_tokens_per_s: float | None = None
    """Measured rate of a prompt for which less urgent decodes step aside, their share of the work subtracted (EWMA over steps); None
    before the first prefill, and if they never step aside."""
    decode_step_s: float | None = None
    """Measured seconds of a decode-only step for each token that its requests got (EWMA over steps); None before the first."""
    transfer_tokens_per_s: float | None = None
    """Measured rate of KV received from other replicas (EWMA over handoffs); None before the first."""
    num_steps: int = 0
    num_graphed_steps: int = 0
    """Steps that were replayed as CUDA graphs."""
    num_prompt_tokens: int = 0
    """Prompt tokens computed, again after a preemption included; cached ones do not count."""
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_pauses: int = 0
    """Steps in which a stream stepped aside for a more urgent prompt, summed over the streams."""
    num_finished: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    handoffs: HandoffStats = HandoffStats()
    drafts: tuple[DraftStats, ...] = ()
    """By method; empty without speculation."""
    speculation_gain: float | None = None
    """Tokens per second that the controller expects of its choice, over those without drafts (EWMA over steps); None before any."""
    grammars: GrammarStats = GrammarStats()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """One push to the router. Events `first_event .. first_event + len(events) - 1` follow the last report's."""

    replica_id: str
    model: str
    epoch: int
    """Changes when the replica restarts or drops its cache; everything known of an older epoch is void."""
    stats: ReplicaStats
    block_size: int
    max_num_seqs: int
    first_event: int
    events: tuple[KVEvent, ...] = ()
    is_full_state: bool = False
    """True when `events` lists every cached block (the answer to a resync) rather than changes."""
    role: Role = "unified"
    """The replica's pool."""
    is_draining: bool = False
    """The replica will stop: its requests continue, but it must get no new ones."""
    callers: tuple[str, ...] = ()
    """Gateways that have requests on the replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportReply:
    """The router's answer; with `resync` the next report must carry the full state."""

    resync: bool = False
    dead_callers: tuple[str, ...] = ()
    """Callers in the report whose lease has expired; their requests must be cancelled."""
