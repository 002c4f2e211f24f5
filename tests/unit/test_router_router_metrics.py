"""Routing statistics as metrics: counters grow by what is new, gauges of what has gone become 0."""

from __future__ import annotations

from router.live.router_metrics import COUNTERS, GAUGES, RouterMetrics
from tests.router_harness import make_router, report, request


class _Sink:
    def __init__(self) -> None:
        self.gauges: dict[tuple[str, str, str], float] = {}
        self.counters: dict[tuple[str, str, str], float] = {}

    def set_gauge(self, name: str, model: str, tag: str, value: float) -> None:
        assert bool(GAUGES[name][1]) == bool(tag)
        self.gauges[name, model, tag] = value

    def add_counter(self, name: str, model: str, tag: str, value: float) -> None:
        assert COUNTERS[name][1]
        self.counters[name, model, tag] = self.counters.get((name, model, tag), 0) + value


def test_exported_values_are_those_of_a_hand_made_history() -> None:
    sink = _Sink()
    metrics = RouterMetrics(sink)
    router = make_router(dispatch_ahead=1, max_queue_requests=2)
    router.apply_report(report("r0"), 0.0)
    for index, priority in enumerate((0, 0, 0, 5, 9)):
        router.submit(request(f"q{index}", priority=priority), 0.0)
        router.step(0.0)
    router.submit(request("again", attempt=1, is_alone=True), 0.0)
    metrics.export(router.statistics())
    assert sink.counters == {
        ("manta_router_decisions", "m", "first"): 2,
        ("manta_router_plans", "m", "unified"): 2,
        ("manta_router_rejections", "m", "queue_full"): 1,
    }
    assert sink.gauges["manta_router_queue", "m", "0"] == 2  # one in line, and the one that must run alone
    assert sink.gauges["manta_router_queue", "m", "5"] == 1
    assert ("manta_router_queue", "m", "9") not in sink.gauges
    assert sink.gauges["manta_router_bookings", "m", ""] == 2
    assert sink.gauges["manta_router_replicas", "m", "usable"] == 1
    assert sink.gauges["manta_router_pool_replicas", "m", "unified"] == 1
    assert sink.gauges["manta_router_hit_ratio", "m", "r0"] == 0.0

    router.release("q0", 1.0, 1)
    router.release("q1", 1.0, 1)
    router.step(1.0)
    router.set_fenced(frozenset({"r0"}))
    metrics.export(router.statistics())
    metrics.export(router.statistics())
    assert sink.counters["manta_router_decisions", "m", "alone"] == 1
    assert sink.counters["manta_router_decisions", "m", "first"] == 2  # the replica is reserved
    assert sink.gauges["manta_router_replicas", "m", "fenced"] == 1

    router.remove_replica("r0", 2.0)
    metrics.export(router.statistics())
    assert sink.gauges["manta_router_hit_ratio", "m", "r0"] == 0.0
    assert sink.gauges["manta_router_replicas", "m", "fenced"] == 0
