"""Engine statistics as metrics: gauges are set, counters grow by what is new."""

from __future__ import annotations

from replicas.engine.metrics import EngineMetrics
from replicas.request import StepOutput
from replicas.stats import DraftStats, HandoffStats, ReplicaStats


class _Sink:
    def __init__(self) -> None:
        self.gauges: dict[str, float] = {}
        self.counters: dict[str, float] = {}
        self.steps: list[float] = []

    def set_gauge(self, name: str, value: float) -> None:
        self.gauges[name] = value

    def add_counter(self, name: str, value: float) -> None:
        self.counters[name] = self.counters.get(name, 0) + value

    def add_draft_counter(self, name: str, value: float, method: str, depth: str) -> None:
        label = f"{name} {method} {depth}".rstrip()
        self.counters[label] = self.counters.get(label, 0) + value

    def observe_step(self, seconds: float) -> None:
        self.steps.append(seconds)


def test_export_sets_gauges_and_adds_only_what_is_new() -> None:
    sink = _Sink()
    metrics = EngineMetrics(sink)
    metrics.export(ReplicaStats(num_running=2, num_blocks=10, num_free_blocks=4, num_generated_tokens=30))
    metrics.export(ReplicaStats(num_running=1, num_blocks=10, num_free_blocks=10, num_generated_tokens=45))
    assert sink.gauges["manta_requests_running"] == 1
    assert sink.gauges["manta_kv_use_ratio"] == 0
    assert sink.counters["manta_generated_tokens"] == 45


def test_use_ratio_is_the_held_share_of_the_blocks() -> None:
    sink = _Sink()
    EngineMetrics(sink).export(ReplicaStats(num_blocks=10, num_free_blocks=4))
    assert sink.gauges["manta_kv_use_ratio"] == 0.6
    EngineMetrics(sink).export(ReplicaStats())
    assert sink.gauges["manta_kv_use_ratio"] == 0


def test_what_came_from_other_replicas_is_counted_and_open_leases_are_shown() -> None:
    sink = _Sink()
    metrics = EngineMetrics(sink)
    for num in (1, 3):
        handoffs = HandoffStats(
            num_leases=4 - num, num_leases_expired=num, num_offers=10 * num, num_loads=5 * num, num_recomputes=2 * num,
            num_bytes=1000 * num, transfer_s=0.5 * num, overlap_s=0.25 * num,
        )  # fmt: skip
        metrics.export(ReplicaStats(handoffs=handoffs, transfer_tokens_per_s=123.0))
    names = ("leases_expired", "offers", "loads", "recomputes", "transfer_bytes", "transfer_seconds", "transfer_overlap_seconds")
    assert [sink.counters[f"manta_kv_{name}"] for name in names] == [3, 30, 15, 6, 3000, 1.5, 0.75]
    assert (sink.gauges["manta_kv_leases"], sink.gauges["manta_kv_transfer_tokens_per_second"]) == (1, 123.0)


def test_each_step_is_observed_once() -> None:
    sink = _Sink()
    EngineMetrics(sink).note_step(StepOutput(step_s=0.25))
    assert sink.steps == [0.25]


def test_drafts_are_counted_by_method_and_depth() -> None:
    sink = _Sink()
    metrics = EngineMetrics(sink)
    for num in (1, 3):
        drafts = (
            DraftStats(method="suffix", num_passes=4 * num, num_drafted=9 * num, num_accepted=3 * num, accepted_by_depth=(2 * num, num)),
            DraftStats(method="prediction", num_passes=num, num_drafted=num),
        )
        metrics.export(ReplicaStats(drafts=drafts, speculation_gain=1.3))
    assert {name: count for name, count in sink.counters.items() if "speculation" in name} == {
        "manta_speculation_passes suffix": 12,
        "manta_speculation_drafted_tokens suffix": 27,
        "manta_speculation_accepted_tokens suffix 1": 6,
        "manta_speculation_accepted_tokens suffix 2": 3,
        "manta_speculation_passes prediction": 3,
        "manta_speculation_drafted_tokens prediction": 3,
    }
    assert sink.gauges["manta_speculation_expected_gain"] == 1.3
    metrics.export(ReplicaStats())
    assert sink.gauges["manta_speculation_expected_gain"] == 1.0
