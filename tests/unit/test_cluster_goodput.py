"""Goodput: one outcome for each request that had a target. Begins at 10 s, so that differences are plain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.generation.request_events import (
    Abandoned,
    Begun,
    ChoiceFinished,
    Ended,
    Failed,
    FirstToken,
    GenerationEnded,
    ModelFound,
    Prepared,
    RequestEvent,
)
from cluster.generation.usage import Usage
from cluster.settings.latency_targets import LatencyTarget
from cluster.telemetry import gateway_metrics
from cluster.telemetry.gateway_metrics import GatewayMetrics
from cluster.telemetry.goodput import Outcome, outcome_of
from cluster.telemetry.request_record import RequestRecord, RequestRecorder
from replicas.request import FinishReason

TARGET = LatencyTarget(priority=3, ttft_s=1.0, tpot_s=0.25)
FOUND = ModelFound(at_s=10.0, model="m")
PREPARED = Prepared(at_s=10.0, response_id="x", num_prompt_tokens=2, num_choices=1, target=TARGET)
IN_TIME, LATE = FirstToken(at_s=11.0), FirstToken(at_s=11.125)
LEFT, FAILED = Abandoned(at_s=12.0), Failed(at_s=12.0, code="unavailable")


def finished(num_tokens: int, first_s: float = 11.0, end_s: float = 12.0) -> ChoiceFinished:
    return ChoiceFinished(
        at_s=end_s, index=0, reason=FinishReason.LENGTH, num_tokens=num_tokens, first_token_s=first_s if num_tokens else None
    )


def tokens(count: int) -> GenerationEnded:
    return GenerationEnded(at_s=12.0, usage=Usage(num_prompt_tokens=2, num_output_tokens=count))


def record_of(*events: RequestEvent) -> RequestRecord:
    """Of a request that ends at 12 s."""
    records: list[RequestRecord] = []
    recorder = RequestRecorder(records.append)
    recorder.begin(Begun(at_s=10.0, request_id="r", method="POST", path="/p", tenant="t"))
    for event in (FOUND, *events):
        recorder.see(event)
    recorder.end(Ended(at_s=12.0))
    return records[0]


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ((PREPARED, IN_TIME, finished(5), tokens(5)), "met"),  # 1 s to the first, 1 s for four more
        ((PREPARED, IN_TIME, finished(4), tokens(4)), "tpot_missed"),  # 1 s for three more
        ((PREPARED, LATE, finished(8), tokens(8)), "ttft_missed"),
        ((PREPARED, LATE, finished(2), tokens(2)), "ttft_missed"),  # the first miss names it
        ((PREPARED, IN_TIME, finished(1), tokens(1)), "met"),  # no second token
        ((replace(PREPARED, num_choices=2), IN_TIME, finished(5), finished(5), tokens(10)), "met"),  # two choices side by side
        ((replace(PREPARED, num_choices=2), IN_TIME, finished(5), finished(4), tokens(9)), "tpot_missed"),
        ((replace(PREPARED, num_choices=2), IN_TIME, finished(2, end_s=11.2), finished(101, end_s=31.0), tokens(103)), "met"),  # 0.2 s each
        ((PREPARED, FAILED), "failed"),
        ((PREPARED, IN_TIME, FAILED, tokens(9)), "failed"),
        ((PREPARED, LEFT, tokens(0)), "failed"),
        ((PREPARED, IN_TIME, LEFT, tokens(9)), "met"),
        ((PREPARED, LATE, LEFT, tokens(9)), "ttft_missed"),
        ((PREPARED, finished(0), tokens(0)), "ttft_missed"),  # log-probabilities of the prompt alone, after 2 s
        ((replace(PREPARED, target=LatencyTarget(tpot_s=0.25)), LATE, finished(9), tokens(9)), "met"),
        ((replace(PREPARED, target=LatencyTarget(ttft_s=1.0)), IN_TIME, finished(2), tokens(2)), "met"),
        ((replace(PREPARED, target=None), LATE, finished(2), tokens(2)), None),
        ((FAILED,), None),
    ],
)
def test_outcome_is_judged_by_first_token_then_by_the_mean_gap(events: tuple[RequestEvent, ...], outcome: Outcome | None) -> None:
    assert outcome_of(record_of(*events)) == outcome


class _Metrics:
    """In the place of Ray's metrics: keeps what was added under each name and its tags."""

    def __init__(self) -> None:
        self.told: dict[str, list[tuple[float, dict[str, str]]]] = {}
        self.bounds: dict[str, list[float]] = {}

    def __call__(self, name: str, text: str, *, tag_keys: tuple[str, ...], boundaries: list[float] | None = None) -> _Metric:
        if boundaries is not None:
            self.bounds[name] = boundaries
        return _Metric(self.told.setdefault(name, []), tag_keys)

    Counter = Histogram = __call__


class _Metric:
    def __init__(self, told: list[tuple[float, dict[str, str]]], tag_keys: tuple[str, ...]) -> None:
        self._told, self._tag_keys = told, tag_keys

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self._tag_keys)
        self._told.append((value, tags))

    observe = inc


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> _Metrics:
    fake = _Metrics()
    monkeypatch.setattr(gateway_metrics, "metrics", fake)
    return fake


def test_metric_counts_a_request_once_under_the_priority_of_its_entry(metrics: _Metrics) -> None:
    export = GatewayMetrics()
    export(record_of(PREPARED, IN_TIME, finished(5), tokens(5)))
    export(record_of(PREPARED, FAILED))
    export(record_of(replace(PREPARED, target=None), IN_TIME, finished(5), tokens(5)))
    assert metrics.told["manta_goodput_requests"] == [
        (1, {"model": "m", "priority": "3", "outcome": "met"}),
        (1, {"model": "m", "priority": "3", "outcome": "failed"}),
    ]


def test_metrics_of_an_answered_request_are_its_latencies_and_tokens(metrics: _Metrics) -> None:
    GatewayMetrics()(record_of(PREPARED, IN_TIME, finished(5), tokens(5)))
    tags = {"model": "m"}
    assert metrics.told["manta_time_to_first_token_seconds"] == [(1.0, tags)]
    assert metrics.told["manta_request_seconds"] == [(2.0, tags)]
    assert metrics.told["manta_inter_token_seconds"] == [(0.25, tags)]
    assert metrics.told["manta_http_tokens"] == [(2, {**tags, "kind": "prompt"}), (5, {**tags, "kind": "output"})]


def test_metrics_of_a_failed_request_have_no_latency_of_an_answer(metrics: _Metrics) -> None:
    GatewayMetrics()(record_of(PREPARED, IN_TIME, FAILED, tokens(5)))
    assert metrics.told["manta_time_to_first_token_seconds"] != []
    assert (metrics.told["manta_request_seconds"], metrics.told["manta_inter_token_seconds"]) == ([], [])


def quantile(bounds: list[float], values_s: list[float], share: float) -> float:
    """What Prometheus' histogram_quantile reads off: linear within the bucket in which the share is reached."""
    rank, counted, lower = share * len(values_s), 0, 0.0
    for bound in bounds:
        inside = sum(lower < value <= bound for value in values_s)
        if counted + inside >= rank:
            return lower + (bound - lower) * (rank - counted) / inside
        counted, lower = counted + inside, bound
    return bounds[-1]


def test_quantile_between_one_second_and_two_minutes_is_read_within_a_fifth(metrics: _Metrics) -> None:
    GatewayMetrics()
    names = ("manta_queue_seconds", "manta_time_to_first_token_seconds", "manta_request_seconds", "manta_failover_pause_seconds")
    for name in names:
        for longest_s in (1.3, 3.5, 7.0, 11.0, 14.0, 20.0, 24.0, 28.0, 55.0, 100.0):
            values_s = [longest_s * (0.9 + 0.1 * index / 1000) for index in range(1, 1001)]
            found = quantile(metrics.bounds[name], values_s, 0.95)
            assert found == pytest.approx(0.995 * longest_s, rel=0.2), f"{name}: {found:.1f} for {0.995 * longest_s:.1f} s"
