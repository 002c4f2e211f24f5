"""The experience of clients as metrics: latencies from the gateway's own clock, and requests by outcome."""

from __future__ import annotations

from ray.util import metrics

from cluster.telemetry.goodput import outcome_of
from cluster.telemetry.request_record import RequestRecord

_LATENCY_BOUNDS = [
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.5,
    10.0, 12.5, 15.0, 20.0, 25.0, 30.0, 40.0, 50.0, 60.0, 75.0, 90.0, 120.0,
]  # fmt: skip
"""Close enough that a quantile above a second is read within a fifth."""
_TOKEN_GAP_BOUNDS = [0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5]
_RATIO_BOUNDS = [0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 4.0, 10.0]
_UNKNOWN_MODEL = "none"  # never what a client wrote: that would make one time series per typing error


class GatewayMetrics:
    """Exports each request once, when it has ended. Owns the Ray metrics."""

    def __init__(self) -> None:
        self._requests = metrics.Counter("manta_http_requests", "HTTP requests by path and status", tag_keys=("model", "path", "status"))
        self._tokens = metrics.Counter("manta_http_tokens", "Tokens in and out, as clients were told", tag_keys=("model", "kind"))
        self._failovers = metrics.Counter("manta_failovers", "Choices moved to another replica", tag_keys=("model",))
        self._pairs = metrics.Counter("manta_pairs", "Choices sent to a prefill and a decode replica", tag_keys=("model",))
        self._recomputes = metrics.Counter(
            "manta_pair_recomputes",
            "Choices of a pair that their decode replica was told to compute itself",
            tag_keys=("model", "reason"),
        )
        self._goodput = metrics.Counter(
            "manta_goodput_requests",
            "Requests that had latency targets, by whether they met them",
            tag_keys=("model", "priority", "outcome"),
        )
        self._grammars = metrics.Counter(
            "manta_grammar_requests",
            "Requests whose answer follows a grammar, by its kind; outcome refused: 400 for the grammar, reduced: keywords were dropped",
            tag_keys=("model", "kind", "outcome"),
        )
        self._pause = metrics.Histogram(
            "manta_failover_pause_seconds",
            "From the loss of a replica until the next token of a choice that it ran",
            boundaries=_LATENCY_BOUNDS,
            tag_keys=("model",),
        )
        self._prediction = metrics.Histogram(
            "manta_ttft_prediction_ratio",
            "Actual over predicted time from the router's decision to the first token",
            boundaries=_RATIO_BOUNDS,
            tag_keys=("model",),
        )
        self._queue = _latency("manta_queue_seconds", "From arrival to the router's decision")
        self._ttft = _latency("manta_time_to_first_token_seconds", "From arrival to the first token")
        self._e2e = _latency("manta_request_seconds", "From arrival to the last byte of an answered request")
        self._gap = metrics.Histogram(
            "manta_inter_token_seconds", "Mean time between the tokens of one request", boundaries=_TOKEN_GAP_BOUNDS, tag_keys=("model",)
        )

    def __call__(self, record: RequestRecord) -> None:
        model = record.model or _UNKNOWN_MODEL
        tags = {"model": model}
        path = record.path if record.status not in (404, 405) and record.model is not None else "other"
        self._requests.inc(1, {**tags, "path": path, "status": str(record.status or 0)})
        for kind, count in (
            ("prompt", record.num_prompt_tokens),
            ("cached", record.num_cached_tokens),
            ("output", record.num_output_tokens),
        ):
            if count:
                self._tokens.inc(count, {**tags, "kind": kind})
        if record.num_failovers:
            self._failovers.inc(record.num_failovers, tags)
        if record.num_pairs:
            self._pairs.inc(record.num_pairs, tags)
        for reason in record.recomputes:
            self._recomputes.inc(1, {**tags, "reason": reason})
        for pause_s in record.pauses_s:
            self._pause.observe(pause_s, tags)
        if record.prediction_ratio is not None:
            self._prediction.observe(record.prediction_ratio, tags)
        if record.queue_s is not None:
            self._queue.observe(record.queue_s, tags)
        if record.ttft_s is not None:
            self._ttft.observe(record.ttft_s, tags)
            self._observe_answer(record, tags)
        self._count_goodput(record, tags)
        if record.grammar is not None:
            self._grammars.inc(1, {**tags, "kind": record.grammar, "outcome": "reduced" if record.dropped_keywords else "followed"})
        elif record.error == "invalid_grammar":
            self._grammars.inc(1, {**tags, "kind": "unknown", "outcome": "refused"})

    def _observe_answer(self, record: RequestRecord, tags: dict[str, str]) -> None:
        if record.duration_s is None or record.error is not None:
            return
        self._e2e.observe(record.duration_s, tags)
        if record.tpot_s is not None:
            self._gap.observe(record.tpot_s, tags)

    def _count_goodput(self, record: RequestRecord, tags: dict[str, str]) -> None:
        """Tagged with the priority of the target's entry: the configuration has few, clients have many."""
        outcome = outcome_of(record)
        if record.target is not None and outcome is not None:
            self._goodput.inc(1, {**tags, "priority": str(record.target.priority), "outcome": outcome})


def _latency(name: str, text: str) -> metrics.Histogram:
    return metrics.Histogram(name, text, boundaries=_LATENCY_BOUNDS, tag_keys=("model",))
