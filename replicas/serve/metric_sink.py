"""Exports the engine's metrics through Ray."""

from __future__ import annotations

from ray.util import metrics

from replicas.engine.metrics import COUNTERS, DRAFT_COUNTERS, DRAFT_LABELS, GAUGES, STEP_SECONDS, STEP_SECONDS_BOUNDS


class RayMetricSink:
    """Sends the engine's metrics to Ray's metrics agent, which the dashboard and Prometheus read."""

    def __init__(self, tags: dict[str, str]) -> None:
        keys = tuple(tags)
        self._gauges = {name: metrics.Gauge(name, text, tag_keys=keys) for name, (text, _) in GAUGES.items()}
        self._counters = {name: metrics.Counter(name, text, tag_keys=keys) for name, (text, _) in COUNTERS.items()}
        self._drafts = {name: metrics.Counter(name, text, tag_keys=(*keys, *DRAFT_LABELS)) for name, (text, _) in DRAFT_COUNTERS.items()}
        self._step = metrics.Histogram(STEP_SECONDS, "Duration of a step", boundaries=list(STEP_SECONDS_BOUNDS), tag_keys=keys)
        for metric in (*self._gauges.values(), *self._counters.values(), *self._drafts.values(), self._step):
            metric.set_default_tags(tags)

    def set_gauge(self, name: str, value: float) -> None:
        self._gauges[name].set(value)

    def add_counter(self, name: str, value: float) -> None:
        self._counters[name].inc(value)

    def add_draft_counter(self, name: str, value: float, method: str, depth: str) -> None:
        self._drafts[name].inc(value, tags={"method": method, "depth": depth})

    def observe_step(self, seconds: float) -> None:
        self._step.observe(seconds)
