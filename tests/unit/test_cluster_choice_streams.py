"""The choices of one request as one stream: its order, its counts, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from cluster.failures import GenerationFailed
from cluster.generation.choice_streams import ChoiceStreams
from cluster.generation.prepared_generation import PreparedGeneration
from cluster.generation.request_events import ChoiceFinished, Decided, Dispatched, FirstToken, GenerationEnded, RequestEvent
from cluster.generation.usage import Usage
from cluster.models.served_model import ServedModel
from cluster.settings.failover import FailoverPolicy
from replicas.engine_config import Role
from replicas.model_description import ModelDescription
from replicas.request import FinishReason, GenerationRequest, RequestProgress
from replicas.sampling_params import SamplingParams
from replicas.text.tokenizer import Tokenizer
from router.snapshot import Decision, RoutingRequest
from tests.unit.fake_backend import FakeBackend

PARAMS = SamplingParams(max_tokens=3, n=2)


class _Counting(FakeBackend):
    """Each choice gets three tokens in three messages. Of prompt `a` four tokens are cached for choice 0, two for choice 1."""

    def __init__(self) -> None:
        super().__init__()
        self.num_open = 0
        self.failing_prompt = ""
        self.endless_prompt = ""

    def decide(self, request: RoutingRequest) -> Decision:
        return Decision(request_id=request.request_id, replica_id="only", predicted_ttft_s=0.25)

    async def generate(
        self, model: str, replica_id: str, request: GenerationRequest, role: Role = "unified"
    ) -> AsyncGenerator[RequestProgress, None]:
        self.num_open += 1
        num_cached = (4 if request.choice == 0 else 2) if request.request_id == "a" else 0
        try:
            if request.request_id == self.endless_prompt:
                await asyncio.Event().wait()
            for count in (1, 2, 3):
                ending = (FinishReason.FAILED if request.request_id == self.failing_prompt else FinishReason.LENGTH) if count == 3 else None
                yield RequestProgress(
                    key=request.key, attempt=request.attempt, token_ids=(504,), num_cached_tokens=num_cached, finish_reason=ending
                )
        finally:
            self.num_open -= 1


@pytest.fixture
def model(default_tokenizer: Tokenizer) -> ServedModel:
    description = ModelDescription(max_model_len=100, vocab_size=49_152, block_size=16, dtype="float32", tokenizer_source="x")
    return ServedModel("m", description, default_tokenizer, created_s=0)


def prepared_of(*names: str, is_prompt_only: bool = False) -> PreparedGeneration:
    requests = tuple(GenerationRequest(request_id=name, prompt_ids=(1, 2, 3, 4, 5), params=PARAMS, seed=0) for name in names)
    return PreparedGeneration(response_id="x", model="m", requests=requests, params=PARAMS, is_prompt_only=is_prompt_only)


async def _read_all(streams: ChoiceStreams) -> None:
    async with streams:
        async for _ in streams:
            pass


async def test_prompts_and_choices_are_numbered_and_counted_once_each(model: ServedModel) -> None:
    backend, events = _Counting(), list[RequestEvent]()
    async with ChoiceStreams(prepared_of("a", "b"), model, backend, FailoverPolicy(), events.append) as streams:
        deltas = [delta async for delta in streams]
    assert [sum(len(delta.token_ids) for delta in deltas if delta.index == index) for index in range(4)] == [3, 3, 3, 3]
    usage = Usage(num_prompt_tokens=10, num_output_tokens=12, num_cached_tokens=4)
    assert streams.usage == usage
    told = [type(event) for event in events]
    assert [told.count(kind) for kind in (Decided, Dispatched, FirstToken, ChoiceFinished)] == [2, 4, 1, 4]
    last = events[-1]
    assert isinstance(last, GenerationEnded)
    assert last.usage == usage
    finished = [event for event in events if isinstance(event, ChoiceFinished)]
    assert sorted((event.index, event.num_tokens) for event in finished) == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert all(event.first_token_s is not None and event.first_token_s <= event.at_s for event in finished)
    assert sorted(backend.released) == ["a", "b"]


async def test_second_cancel_while_choices_end_still_tells_the_end(model: ServedModel) -> None:
    events: list[RequestEvent] = []

    async def abandon() -> None:
        async with ChoiceStreams(prepared_of("a"), model, _Counting(), FailoverPolicy(), events.append) as streams:
            await anext(aiter(streams))
            task = asyncio.current_task()
            assert task is not None
            task.cancel()  # strikes at the next wait, which is that for the choices

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(abandon())
    assert isinstance(events[-1], GenerationEnded)
    assert events[-1].usage.num_output_tokens == 1


async def test_first_token_is_told_when_the_reader_takes_it(model: ServedModel) -> None:
    events: list[RequestEvent] = []
    async with ChoiceStreams(prepared_of("a"), model, _Counting(), FailoverPolicy(), events.append) as streams:
        reader = aiter(streams)
        await anext(reader)
        assert isinstance(events[-1], FirstToken)
        assert streams.usage.num_output_tokens == 1


async def test_leaving_ends_what_runs_and_counts_what_was_taken(model: ServedModel) -> None:
    backend, events = _Counting(), list[RequestEvent]()
    backend.endless_prompt = "b"
    async with asyncio.timeout(30):
        async with ChoiceStreams(prepared_of("a", "b"), model, backend, FailoverPolicy(), events.append) as streams:
            async for _ in streams:
                if backend.num_open == 2 and streams.usage.num_output_tokens == 6:
                    break
    assert backend.num_open == 0
    assert sorted(backend.released) == ["a", "b"]
    last = events[-1]
    assert isinstance(last, GenerationEnded)
    assert last.usage.num_output_tokens == 6


async def test_failure_of_one_prompt_reaches_the_reader_and_ends_the_others(model: ServedModel) -> None:
    backend = _Counting()
    backend.failing_prompt, backend.endless_prompt = "a", "b"
    streams = ChoiceStreams(prepared_of("a", "b"), model, backend, FailoverPolicy(), lambda event: None)
    with pytest.raises(GenerationFailed):
        await asyncio.wait_for(_read_all(streams), 30)
    assert backend.num_open == 0
    assert sorted(backend.released) == ["a", "b"]


async def test_prompt_only_request_asks_nobody_and_ends_each_choice(model: ServedModel) -> None:
    backend, events = _Counting(), list[RequestEvent]()
    async with ChoiceStreams(prepared_of("a", is_prompt_only=True), model, backend, FailoverPolicy(), events.append) as streams:
        assert [(delta.index, delta.finish_reason) async for delta in streams] == [(0, FinishReason.LENGTH), (1, FinishReason.LENGTH)]
    assert backend.routed == []
    assert [type(event) for event in events] == [GenerationEnded]
    assert streams.usage == Usage(num_prompt_tokens=5)
