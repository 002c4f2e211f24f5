"""What the router exports as metrics, as names and values. Free of Ray: whoever exports them is injected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from router.routing_statistics import RoutingStatistics

# Name -> (help text, tag beside the model).
GAUGES: Mapping[str, tuple[str, str]] = {
    "manta_router_queue": ("Requests that wait in the router, by priority", "priority"),
    "manta_router_replicas": ("Replicas by state: usable, draining, fenced (hung), reserved (for one request alone)", "state"),
    "manta_router_bookings": ("Requests dispatched and not ended", ""),
    "manta_router_pool_replicas": ("Usable replicas by pool: unified, prefill, decode", "pool"),
    "manta_router_prefill_bookings": ("Requests of a pair whose prompt is still with the prefill pool", ""),
    "manta_router_hit_ratio": ("Share of the prompt tokens sent to a replica that were known to be cached there", "replica"),
}
COUNTERS: Mapping[str, tuple[str, str]] = {
    "manta_router_decisions": ("Decisions: first ones, resends after a loss, and those to run alone", "kind"),
    "manta_router_plans": ("Decisions by plan: a pair, or the pool of the one replica that does it all", "plan"),
    "manta_router_rejections": ("Requests not admitted, by reason", "reason"),
}


class MetricSink(Protocol):
    """Where values go; `tag` is the value of the metric's own tag, empty when it has none."""

    def set_gauge(self, name: str, model: str, tag: str, value: float) -> None: ...
    def add_counter(self, name: str, model: str, tag: str, value: float) -> None: ...


class RouterMetrics:
    """Turns statistics into values. Owns the last ones exported: counters become increments, and a gauge whose tag has gone is
    set to 0 once, so that it does not stand for ever."""

    def __init__(self, sink: MetricSink) -> None:
        self._sink = sink
        self._counts: dict[tuple[str, str, str], int] = {}
        self._shown: set[tuple[str, str, str]] = set()

    def export(self, statistics: Mapping[str, RoutingStatistics]) -> None:
        """`statistics` by model."""
        shown: set[tuple[str, str, str]] = set()
        for model, one in statistics.items():
            gauges: list[tuple[str, str, float]] = [("manta_router_bookings", "", one.num_bookings)]
            gauges.append(("manta_router_prefill_bookings", "", one.num_prefill_bookings))
            gauges += [("manta_router_pool_replicas", role, count) for role, count in one.num_usable_by_pool.items()]
            gauges += [("manta_router_queue", str(priority), count) for priority, count in one.num_waiting.items()]
            gauges += [("manta_router_replicas", state, count) for state, count in one.num_replicas.items()]
            gauges += [
                ("manta_router_hit_ratio", replica_id, one.num_cached_tokens.get(replica_id, 0) / count)
                for replica_id, count in one.num_prompt_tokens.items()
                if count
            ]
            for name, tag, value in gauges:
                self._sink.set_gauge(name, model, tag, value)
                shown.add((name, model, tag))
            for kind, count in one.num_decisions.items():
                self._count("manta_router_decisions", model, kind, count)
            for plan, count in one.num_plans.items():
                self._count("manta_router_plans", model, plan, count)
            for reason, count in one.num_rejections.items():
                self._count("manta_router_rejections", model, reason, count)
        for name, model, tag in self._shown - shown:
            self._sink.set_gauge(name, model, tag, 0.0)
        self._shown = shown

    def _count(self, name: str, model: str, tag: str, count: int) -> None:
        key = (name, model, tag)
        if count > (old := self._counts.get(key, 0)):
            self._sink.add_counter(name, model, tag, count - old)
            self._counts[key] = count
