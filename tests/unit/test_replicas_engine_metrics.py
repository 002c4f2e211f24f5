"""Engine statistics as metrics: gauges are set, counters grow by what is new."""

from __future__ import annotations

from replicas.engine_metrics import EngineMetrics
from replicas.request import StepOutput
from replicas.stats import ReplicaStats


class _Sink:
    def __init__(self) -> None:
        self.gauges: dict[str, float] = {}
        self.counters: dict[str, float] = {}
        self.steps: list[float] = []

    def set_gauge(self, name: str, value: float) -> None:
        self.gauges[name] = value

    def add_counter(self, name: str, value: float) -> None:
        self.counters[name] = self.counters.get(name, 0) + value

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


def test_each_step_is_observed_once() -> None:
    sink = _Sink()
    EngineMetrics(sink).note_step(StepOutput(step_s=0.25))
    assert sink.steps == [0.25]
