"""The journal of one choice: every emitted token once, whatever attempts and late messages there were."""

from __future__ import annotations

from cluster.generation.stream_journal import StreamJournal
from replicas.request import GenerationRequest, RequestProgress
from replicas.sampling_params import SamplingParams


def journal(output_ids: tuple[int, ...] = ()) -> StreamJournal:
    return StreamJournal(GenerationRequest(request_id="r", prompt_ids=(1, 2), params=SamplingParams(), seed=3, output_ids=output_ids))


def progress(stream: StreamJournal, *token_ids: int, attempt: int = 0) -> RequestProgress:
    return RequestProgress(key=stream.current_request().key, attempt=attempt, token_ids=token_ids)


def test_resend_carries_what_was_emitted_and_a_higher_attempt() -> None:
    stream = journal()
    assert stream.try_record(progress(stream, 5, 6))
    assert stream.try_record(progress(stream, 7))
    resend = stream.begin_attempt()
    assert resend.output_ids == (5, 6, 7)
    assert resend.attempt == 1
    assert (resend.prompt_ids, resend.seed) == ((1, 2), 3)


def test_message_of_an_older_attempt_is_dropped() -> None:
    stream = journal()
    stream.try_record(progress(stream, 5))
    stream.begin_attempt()
    assert not stream.try_record(progress(stream, 6, attempt=0))
    assert stream.try_record(progress(stream, 9, attempt=1))
    assert stream.begin_attempt().output_ids == (5, 9)


def test_request_that_was_already_under_way_keeps_its_tokens() -> None:
    stream = journal(output_ids=(8,))
    stream.try_record(progress(stream, 9))
    assert stream.current_request().output_ids == (8, 9)
    assert stream.num_tokens == 2
