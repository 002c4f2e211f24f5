"""Names and values of an engine's metrics. Free of Ray: the sink is injected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from replicas.request import StepOutput
from replicas.stats import DraftStats, ReplicaStats

# Name -> (help text, its value from the statistics). All have the tags model, replica, role, runner and quantization.
GAUGES: Mapping[str, tuple[str, Callable[[ReplicaStats], float]]] = {
    "manta_requests_running": ("Requests in the engine's batch", lambda stats: stats.num_running),
    "manta_requests_waiting": ("Requests in the engine's own queue", lambda stats: stats.num_waiting),
    "manta_uncomputed_tokens": ("Prompt tokens that no step has computed yet", lambda stats: stats.num_uncomputed_tokens),
    "manta_kv_blocks": ("KV blocks of the engine", lambda stats: stats.num_blocks),
    "manta_kv_blocks_used": ("KV blocks held by requests", lambda stats: stats.num_blocks - stats.num_free_blocks),
    "manta_kv_use_ratio": (
        "Share of the KV blocks held by requests",
        lambda stats: 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0,
    ),
    "manta_kv_blocks_cached": ("KV blocks that a prefix can find", lambda stats: stats.num_cached_blocks),
    "manta_prefill_tokens_per_second": ("Measured prefill rate", lambda stats: stats.prefill_tokens_per_s or 0.0),
    "manta_speculation_expected_gain": (
        "Tokens per second that drafts are expected to give, over those without; 1 where none are worth their time",
        lambda stats: stats.speculation_gain or 1.0,
    ),
    "manta_kv_leases": ("Leases under which other replicas may read KV here", lambda stats: stats.handoffs.num_leases),
    "manta_kv_transfer_tokens_per_second": (
        "Measured rate of KV received from other replicas",
        lambda stats: stats.transfer_tokens_per_s or 0.0,
    ),
}

COUNTERS: Mapping[str, tuple[str, Callable[[ReplicaStats], float]]] = {
    "manta_engine_steps": ("Steps run", lambda stats: stats.num_steps),
    "manta_engine_graphed_steps": ("Steps replayed as CUDA graphs", lambda stats: stats.num_graphed_steps),
    "manta_prompt_tokens": ("Prompt tokens computed, recomputed ones included", lambda stats: stats.num_prompt_tokens),
    "manta_cached_prompt_tokens": ("Prompt tokens whose KV came from the prefix cache", lambda stats: stats.num_cached_tokens),
    "manta_generated_tokens": ("Tokens generated", lambda stats: stats.num_generated_tokens),
    "manta_preemptions": ("Requests whose KV was dropped to be computed again", lambda stats: stats.num_preemptions),
    "manta_urgent_pauses": (
        "Steps in which a stream stepped aside for a more urgent prompt, summed over the streams",
        lambda stats: stats.num_pauses,
    ),
    "manta_requests_finished": ("Requests that ended with an answer", lambda stats: stats.num_finished),
    "manta_requests_cancelled": ("Requests that their client or gateway cancelled", lambda stats: stats.num_cancelled),
    "manta_requests_failed": ("Requests that the engine could not finish", lambda stats: stats.num_failed),
    "manta_kv_offers": ("Requests whose KV was offered to other replicas", lambda stats: stats.handoffs.num_offers),
    "manta_kv_leases_expired": ("Leases that expired without renewal", lambda stats: stats.handoffs.num_leases_expired),
    "manta_kv_loads": ("Requests whose KV came from another replica", lambda stats: stats.handoffs.num_loads),
    "manta_kv_recomputes": ("Requests whose KV was computed after a failed handoff", lambda stats: stats.handoffs.num_recomputes),
    "manta_kv_transfer_bytes": ("KV bytes received from other replicas", lambda stats: stats.handoffs.num_bytes),
    "manta_kv_transfer_seconds": ("Seconds in which KV bytes moved", lambda stats: stats.handoffs.transfer_s),
    "manta_grammar_compiles": ("Grammars compiled, refused ones included", lambda stats: stats.grammars.num_compiles),
    "manta_grammar_compile_seconds": ("Seconds of compiling grammars", lambda stats: stats.grammars.compile_s),
    "manta_grammar_cache_hits": ("Requests whose grammar was compiled before", lambda stats: stats.grammars.num_cache_hits),
    "manta_grammar_refusals": ("Grammars that the engine could not compile", lambda stats: stats.grammars.num_refused),
    "manta_grammar_masks": ("Logit masks computed beside the model", lambda stats: stats.grammars.num_masks),
    "manta_grammar_mask_seconds": ("Seconds of one thread for these masks", lambda stats: stats.grammars.mask_s),
    "manta_grammar_late_masks": ("Masks too slow for their step, whose token came later", lambda stats: stats.grammars.num_late_masks),
    "manta_grammar_forced_tokens": ("Generated tokens that a grammar forced", lambda stats: stats.grammars.num_forced_tokens),
    "manta_kv_transfer_overlap_seconds": ("Seconds of KV transfer before the prefill ended", lambda stats: stats.handoffs.overlap_s),
}

# Name -> (help text, its values by method, and by depth where "depth" is a label). They have the further tags of DRAFT_LABELS.
DRAFT_COUNTERS: Mapping[str, tuple[str, Callable[[DraftStats], Mapping[str, int]]]] = {
    "manta_speculation_passes": ("Steps of a request that verified drafts", lambda drafts: {"": drafts.num_passes}),
    "manta_speculation_drafted_tokens": ("Drafts verified", lambda drafts: {"": drafts.num_drafted}),
    "manta_speculation_accepted_tokens": (
        "Drafts accepted, by depth: 1 is the first draft of a step",
        lambda drafts: {str(depth): count for depth, count in enumerate(drafts.accepted_by_depth, start=1)},
    ),
}
DRAFT_LABELS = ("method", "depth")

STEP_SECONDS = "manta_step_seconds"
STEP_SECONDS_BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class MetricSink(Protocol):
    """Receives the values."""

    def set_gauge(self, name: str, value: float) -> None: ...
    def add_counter(self, name: str, value: float) -> None: ...
    def add_draft_counter(self, name: str, value: float, method: str, depth: str) -> None:
        """`depth` is empty for counters that are not by depth."""

    def observe_step(self, seconds: float) -> None: ...


class EngineMetrics:
    """Turns counters of the statistics into increments. Owns the last exported values."""

    def __init__(self, sink: MetricSink) -> None:
        self._sink = sink
        self._exported: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._exported_drafts: dict[tuple[str, str, str], int] = {}  # name, method, depth -> value

    def export(self, stats: ReplicaStats) -> None:
        for name, (_, value_of) in GAUGES.items():
            self._sink.set_gauge(name, value_of(stats))
        for name, (_, count_of) in COUNTERS.items():
            count = count_of(stats)
            if count > self._exported[name]:
                self._sink.add_counter(name, count - self._exported[name])
                self._exported[name] = count
        for drafts in stats.drafts:
            for name, (_, counts_of) in DRAFT_COUNTERS.items():
                for depth, num in counts_of(drafts).items():
                    label = (name, drafts.method, depth)
                    if new := num - self._exported_drafts.get(label, 0):
                        self._sink.add_draft_counter(name, new, drafts.method, depth)
                        self._exported_drafts[label] = num

    def note_step(self, output: StepOutput) -> None:
        if output.step_s > 0:  # 0 for a step that only reported endings
            self._sink.observe_step(output.step_s)
