"""One request as its events tell it; times are chosen so that differences are plain."""

from __future__ import annotations

import pytest

from cluster.generation.request_events import (
    Abandoned,
    AnswerStarted,
    Begun,
    ChoiceFinished,
    Decided,
    Dispatched,
    Ended,
    Failed,
    FirstToken,
    GenerationEnded,
    Lost,
    ModelFound,
    Moved,
    Parsed,
    Prepared,
    Recomputed,
    RequestEvent,
    Resumed,
)
from cluster.generation.usage import Usage
from cluster.telemetry.request_record import RequestRecord, RequestRecorder
from replicas.request import FinishReason

BEGUN = Begun(at_s=10.0, request_id="r", method="POST", path="/p", tenant="acme")


def record_of(*events: RequestEvent, ended_s: float = 20.0) -> RequestRecord:
    records: list[RequestRecord] = []
    recorder = RequestRecorder(records.append)
    recorder.begin(BEGUN)
    for event in events:
        recorder.see(event)
    assert records == [], "sinks get it when it has ended"
    recorder.end(Ended(at_s=ended_s))
    (record,) = records
    return record


def test_record_of_an_answered_request_has_every_fact() -> None:
    record = record_of(
        Parsed(at_s=10.1, user="ann", prompt="text"),
        ModelFound(at_s=10.1, model="m"),
        Prepared(at_s=10.2, response_id="x-1", num_prompt_tokens=7),
        Decided(at_s=10.5, predicted_ttft_s=0.5),
        Dispatched(at_s=10.5, index=0, replica_id="a", part="whole"),
        AnswerStarted(at_s=11.5, status=200),
        FirstToken(at_s=11.5),
        ChoiceFinished(at_s=12.0, index=0, reason=FinishReason.STOP, num_tokens=5, first_token_s=11.0),
        GenerationEnded(at_s=12.0, usage=Usage(num_prompt_tokens=7, num_output_tokens=4, num_cached_tokens=2)),
        ended_s=12.5,
    )
    assert record == RequestRecord(
        request_id="r", method="POST", path="/p", tenant="acme", started_s=10.0, user="ann", prompt="text", model="m", response_id="x-1",
        status=200, num_prompt_tokens=7, num_cached_tokens=2, num_output_tokens=4, decided_s=10.5, predicted_ttft_s=0.5,
        first_token_s=11.5, finished_s=12.5, finish_reasons=["stop"], replicas=["a"], token_time_s=1.0, num_gaps=4,
    )  # fmt: skip
    assert record.tpot_s == 0.25
    assert (record.queue_s, record.ttft_s, record.duration_s, record.prediction_ratio) == (0.5, 1.5, 2.5, 2.0)


def test_first_decision_of_several_prompts_counts() -> None:
    record = record_of(Decided(at_s=10.5, predicted_ttft_s=0.5), Decided(at_s=11.0, predicted_ttft_s=3.0))
    assert (record.queue_s, record.predicted_ttft_s) == (0.5, 0.5)


def test_pairs_are_counted_by_their_prefill_and_replicas_named_once() -> None:
    parts = [("p", "prefill"), ("d", "decode"), ("p", "prefill"), ("d2", "decode"), ("d2", "whole")]
    record = record_of(*(Dispatched(at_s=11.0, index=0, replica_id=name, part=part) for name, part in parts))
    assert (record.num_pairs, record.replicas) == (2, ["p", "d", "d2"])


@pytest.mark.parametrize(
    "event", [Lost(at_s=11.0, index=0, replica_id="a"), Recomputed(at_s=11.0, index=0, reason="prefill_lost")], ids=["lost", "recomputed"]
)
def test_prediction_is_not_measured_where_something_was_lost(event: RequestEvent) -> None:
    decided, first = Decided(at_s=11.0, predicted_ttft_s=0.5), FirstToken(at_s=12.0)
    assert record_of(decided, first).prediction_ratio == 2.0
    assert record_of(decided, event, first).prediction_ratio is None


def test_choice_that_moved_leaves_its_pause() -> None:
    record = record_of(Lost(at_s=11.0, index=1, replica_id="a"), Moved(at_s=11.0, index=1), Resumed(at_s=13.0, index=1, pause_s=2.0))
    assert (record.num_losses, record.num_failovers, record.pauses_s) == (1, 1, [2.0])


def test_error_keeps_the_status_that_is_out_and_a_client_that_left_has_its_own() -> None:
    assert record_of(AnswerStarted(at_s=11.0, status=200), Failed(at_s=12.0, code="unavailable")).error == "unavailable"
    left = record_of(AnswerStarted(at_s=11.0, status=200), Abandoned(at_s=12.0))
    assert (left.status, left.error) == (499, "client disconnected")
