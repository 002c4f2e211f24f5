"""Choices over a prefill and a decode replica that are lost at every moment, as the reader of the answer sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from cluster.failures import GenerationFailed, ReplicaDied, ReplicaHung, ReplicaLeft
from cluster.generation.choice_delta import ChoiceDelta
from cluster.generation.choice_streams import ChoiceStreams
from cluster.generation.prepared_generation import PreparedGeneration, routing_request
from cluster.models.served_model import ServedModel
from cluster.settings.failover import FailoverPolicy
from cluster.telemetry.request_record import RequestRecord
from replicas.model_description import ModelDescription
from replicas.request import FinishReason, GenerationRequest, RequestRejected, TokenLogprob
from replicas.sampling_params import SamplingParams
from replicas.text.tokenizer import Tokenizer
from tests.unit.pair_backend import DECODE_MOMENTS, FIRST_TOKEN, NUM_OUTPUT, PREFILL_MOMENTS, Loss, Moment, PairBackend, logprob

WHOLE = [FIRST_TOKEN + index for index in range(NUM_OUTPUT)]
PARAMS = SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True)
REQUEST = GenerationRequest(request_id="a", prompt_ids=(1, 2), params=PARAMS, seed=0)
LOSSES: tuple[Loss, ...] = (ReplicaDied, ReplicaHung, ReplicaLeft, FinishReason.CANCELLED, FinishReason.FAILED)


@dataclass
class Answer:
    """One HTTP request's choices, as their reader got them."""

    record: RequestRecord
    deltas: dict[int, list[ChoiceDelta]] = field(default_factory=dict)

    def tokens(self, index: int = 0) -> list[int]:
        return [token_id for delta in self.deltas[index] for token_id in delta.token_ids]

    def logprobs(self) -> list[TokenLogprob]:
        return [one for delta in self.deltas[0] for one in delta.logprobs]

    def ends(self) -> list[FinishReason | None]:
        return [deltas[-1].finish_reason for deltas in self.deltas.values()]


Ask = Callable[..., "asyncio.Task[Answer]"]


@pytest.fixture
def backend() -> PairBackend:
    return PairBackend()


@pytest.fixture
def ask(default_tokenizer: Tokenizer, backend: PairBackend) -> Ask:
    """Begins to read the answer to a request with these parameters."""
    description = ModelDescription(max_model_len=100, vocab_size=49_152, block_size=16, dtype="float32", tokenizer_source="x")
    model = ServedModel("m", description, default_tokenizer, created_s=0)

    async def read(answer: Answer, params: SamplingParams, policy: FailoverPolicy) -> Answer:
        prepared = PreparedGeneration(response_id="a", model="m", requests=(replace(REQUEST, params=params),), params=params)
        async with asyncio.timeout(30), ChoiceStreams(prepared, model, backend, policy, answer.record.see) as streams:
            async for delta in streams:
                answer.deltas.setdefault(delta.index, []).append(delta)
        return answer

    def begin(params: SamplingParams = PARAMS, policy: FailoverPolicy | None = None) -> asyncio.Task[Answer]:
        record = RequestRecord(request_id="a", method="POST", path="/v1/completions", started_s=0.0)
        return asyncio.create_task(read(Answer(record), params, policy or FailoverPolicy()))

    return begin


def check_all_ended(backend: PairBackend) -> None:
    """Nothing runs, and nothing stays booked."""
    assert not any(backend.num_open.values())
    assert sorted(backend.acquired) == sorted(backend.released)
    assert len(backend.prefills_released) == len(set(backend.prefills_released))


def sent_to(backend: PairBackend, replica_id: str) -> list[GenerationRequest]:
    return [request for target, _, request in backend.sent if target == replica_id]


async def test_decode_replica_gets_the_handoff_and_both_are_noted(ask: Ask, backend: PairBackend) -> None:
    answer = await ask()
    assert answer.tokens() == WHOLE
    assert answer.ends() == [FinishReason.LENGTH]
    assert [(target, role) for target, role, _ in backend.sent] == [("p", "prefill"), ("d", "decode")]
    (first,), (second,) = sent_to(backend, "p"), sent_to(backend, "d")
    assert first == replace(REQUEST, wants_handoff=True)
    assert second.handoff is not None
    assert second == replace(REQUEST, handoff=second.handoff)
    assert (answer.record.replicas, answer.record.num_pairs, answer.record.recomputes) == (["p", "d"], 1, [])
    assert backend.prefills_released == ["a"]
    check_all_ended(backend)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("moment", PREFILL_MOMENTS)
async def test_lost_prefill_replica_is_replaced_by_the_decode_replica(ask: Ask, backend: PairBackend, moment: Moment, loss: Loss) -> None:
    backend.losses = {moment: loss}
    answer = await ask()
    assert answer.tokens() == WHOLE
    assert backend.acquired == ["a"], "the decode replica needs no new decision"
    assert backend.gone == (["p"] if loss is ReplicaDied else [])
    assert backend.prefills_released == ["a"]
    must_begin_anew = moment == "first chunk" or loss is ReplicaHung
    assert answer.record.recomputes == (["prefill_lost"] if must_begin_anew else [])
    last = sent_to(backend, "d")[-1]
    assert (last.handoff is None, last.attempt) == ((True, 1) if must_begin_anew else (False, 0))
    assert len(answer.record.pauses_s) == 1
    check_all_ended(backend)


async def test_prefill_replica_that_hangs_before_its_kv_is_taken_is_not_waited_for(ask: Ask, backend: PairBackend) -> None:
    backend.can_take_over = False
    reader = ask(replace(PARAMS, logprobs=0), FailoverPolicy(max_deaths=1))  # it had ended there: not a death of its own
    async with asyncio.timeout(30):
        while not backend.prefills_released:
            await asyncio.sleep(0)
    backend.hung["p"].set()
    answer = await reader
    assert answer.tokens() == WHOLE
    assert answer.logprobs() == [logprob(token_id) for token_id in WHOLE]
    assert answer.record.recomputes == ["prefill_lost"]
    again = sent_to(backend, "d")[-1]
    assert (again.output_ids, again.attempt, again.handoff) == ((FIRST_TOKEN,), 1, None)
    assert not backend.gone
    check_all_ended(backend)


async def test_prefill_replica_that_hangs_after_its_kv_was_taken_is_of_no_concern(ask: Ask, backend: PairBackend) -> None:
    backend.pause_at = "first token"
    reader = ask()
    await backend.is_paused.wait()
    backend.hung["p"].set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert [target for target, _, _ in backend.sent] == ["p", "d"]
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    check_all_ended(backend)


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss is not FinishReason.FAILED], ids=str)
@pytest.mark.parametrize("moment", DECODE_MOMENTS)
async def test_lost_decode_replica_costs_a_new_decision(ask: Ask, backend: PairBackend, moment: Moment, loss: Loss) -> None:
    backend.losses = {moment: loss}
    answer = await ask()
    assert answer.tokens() == WHOLE
    assert backend.acquired == ["a", "a-0-1"]
    assert backend.routed[1].excluded_replicas == {"d"}
    assert backend.gone == (["d"] if loss is ReplicaDied else [])
    assert backend.prefills_released == ["a", "a-0-1"]
    num_out = {"begun": (0, 1), "first token": (1,), "decoding": (3,)}[moment]
    for again in (sent_to(backend, "p")[1], sent_to(backend, "d2")[0]):
        assert len(again.output_ids) in num_out
        assert again.attempt == 1
    assert answer.record.num_failovers == 1
    check_all_ended(backend)


@pytest.mark.parametrize("moment", DECODE_MOMENTS)
async def test_failure_in_decode_is_the_answer(ask: Ask, backend: PairBackend, moment: Moment) -> None:
    backend.losses = {moment: FinishReason.FAILED}
    with pytest.raises(GenerationFailed, match="the engine failed"):
        await ask()
    check_all_ended(backend)


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("moment", [*PREFILL_MOMENTS, *DECODE_MOMENTS])
async def test_client_that_leaves_closes_both_streams(ask: Ask, backend: PairBackend, moment: Moment, num_choices: int) -> None:
    backend.pause_at = moment
    reader = ask(replace(PARAMS, n=num_choices))
    await backend.is_paused.wait()
    assert backend.num_open["p" if moment in PREFILL_MOMENTS else "d"] > 0
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert reader.cancelled()
    check_all_ended(backend)


async def test_prefill_is_released_once_when_all_choices_are_done_there(ask: Ask, backend: PairBackend) -> None:
    answer = await ask(replace(PARAMS, n=3))
    assert [answer.tokens(index) for index in range(3)] == [WHOLE] * 3
    assert backend.prefills_released == ["a"]
    assert answer.record.num_pairs == 3
    check_all_ended(backend)


async def test_prefill_is_not_released_while_one_choice_is_there(ask: Ask, backend: PairBackend) -> None:
    backend.losses = {"first chunk": ReplicaHung}  # of the first choice, which then decodes while the others are held
    backend.pause_at = "handed over"
    reader = ask(replace(PARAMS, n=2))
    await backend.is_paused.wait()
    async with asyncio.timeout(30):
        while (len(sent_to(backend, "d")), backend.num_open["d"]) != (2, 1):
            await asyncio.sleep(0)
    assert not backend.prefills_released
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    check_all_ended(backend)


async def test_stop_string_in_the_first_token_ends_both_sides(ask: Ask, backend: PairBackend, default_tokenizer: Tokenizer) -> None:
    answer = await ask(replace(PARAMS, stop=(default_tokenizer.token_text(FIRST_TOKEN).strip(),)))
    assert (answer.tokens(), answer.ends()) == ([FIRST_TOKEN], [FinishReason.STOP])
    check_all_ended(backend)


async def test_answer_of_one_token_is_asked_of_one_replica(ask: Ask, backend: PairBackend) -> None:
    answer = await ask(replace(PARAMS, max_tokens=1))
    assert (answer.tokens(), answer.ends()) == ([FIRST_TOKEN], [FinishReason.LENGTH])
    assert [request.is_whole for request in backend.routed] == [True]
    assert len(answer.record.replicas) == 1
    check_all_ended(backend)


@pytest.mark.parametrize("moment", PREFILL_MOMENTS)
async def test_answer_of_one_token_survives_its_prefill_replica(ask: Ask, backend: PairBackend, moment: Moment) -> None:
    backend.losses = {moment: ReplicaDied}
    answer = await ask(replace(PARAMS, max_tokens=1))
    assert (answer.tokens(), answer.ends()) == ([FIRST_TOKEN], [FinishReason.LENGTH])
    check_all_ended(backend)


@pytest.mark.parametrize("is_decode_first", [False, True])
async def test_every_token_has_its_own_logprob(ask: Ask, backend: PairBackend, is_decode_first: bool) -> None:
    backend.is_decode_first = is_decode_first
    answer = await ask(replace(PARAMS, logprobs=0))
    assert answer.tokens() == WHOLE
    assert answer.logprobs() == [logprob(token_id) for token_id in WHOLE]
    check_all_ended(backend)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
async def test_token_whose_logprob_is_lost_with_the_prefill_replica_is_computed_anew(ask: Ask, backend: PairBackend, loss: Loss) -> None:
    backend.is_decode_first, backend.losses = True, {"overtaken": loss}
    answer = await ask(replace(PARAMS, logprobs=0))
    assert answer.tokens() == WHOLE
    assert answer.logprobs() == [logprob(token_id) for token_id in WHOLE]
    assert answer.record.recomputes == ["prefill_lost"]
    check_all_ended(backend)


async def test_first_token_that_differs_is_never_taken_back(ask: Ask, backend: PairBackend) -> None:
    backend.first_decoded = 999
    answer = await ask()
    assert answer.tokens() == WHOLE
    assert answer.record.recomputes == ["first_token_differs"]
    again = sent_to(backend, "d")[-1]
    assert (again.output_ids, again.attempt, again.handoff) == ((FIRST_TOKEN,), 1, None)
    assert backend.acquired == ["a"]
    check_all_ended(backend)


async def test_decode_replica_ahead_of_the_prefill_replica_is_believed(ask: Ask, backend: PairBackend) -> None:
    backend.is_decode_first, backend.first_decoded = True, 999
    answer = await ask()
    assert answer.tokens() == [999, *WHOLE[1:]]
    assert not answer.record.recomputes
    check_all_ended(backend)


async def test_prefill_replica_that_rejects_gives_the_requests_error(ask: Ask, backend: PairBackend) -> None:
    backend.rejects_prefills = True
    with pytest.raises(RequestRejected, match="too long"):
        await ask()
    assert not sent_to(backend, "d")
    check_all_ended(backend)


@pytest.mark.parametrize("moment", PREFILL_MOMENTS)
async def test_choice_present_at_a_second_death_in_its_prefill_runs_alone(ask: Ask, backend: PairBackend, moment: Moment) -> None:
    backend.losses = {"begun": ReplicaDied}
    deaths = iter([None, ReplicaDied])

    def die_next(request: object) -> None:
        if (loss := next(deaths, None)) is not None:
            backend.losses = {moment: loss}

    decide = backend.decide
    backend.decide = lambda request: (die_next(request), decide(request))[1]  # type: ignore[method-assign]
    answer = await ask()
    assert answer.tokens() == WHOLE
    assert [(request.is_alone, request.is_whole) for request in backend.routed] == [(False, False), (False, False), (True, True)]
    assert backend.routed[-1].excluded_replicas == {"d", "p"}
    assert backend.gone == ["d", "p"]
    assert backend.sent[-1][:2] == ("d2", "decode")
    assert not answer.record.recomputes, "it may not run beside others meanwhile"
    check_all_ended(backend)


async def test_death_of_a_prefill_replica_counts_towards_the_last_one(ask: Ask, backend: PairBackend) -> None:
    backend.losses = {"first chunk": ReplicaDied}
    with pytest.raises(GenerationFailed, match="1 replicas died"):
        await ask(policy=FailoverPolicy(max_deaths=1))
    check_all_ended(backend)


def test_prompt_logprobs_are_asked_of_one_replica() -> None:
    for num, is_whole in ((None, False), (2, True)):
        request = replace(REQUEST, params=SamplingParams(max_tokens=2, prompt_logprobs=num))
        assert routing_request("m", request, block_size=16, weights_version="", num_choices=1).is_whole is is_whole
