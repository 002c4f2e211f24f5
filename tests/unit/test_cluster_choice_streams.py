"""Choices over a backend whose replicas and router fail as told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from cluster.failures import GenerationFailed, ReplicaDied, ReplicaGone, ReplicaHung, ReplicaLeft, Unavailable
from cluster.generation.choice_streams import ChoiceStreams
from cluster.generation.prepared_generation import PreparedGeneration
from cluster.generation.served_model import ServedModel
from cluster.settings.failover import FailoverPolicy
from cluster.telemetry.access_log import AccessRecord
from replicas.engine_config import Role
from replicas.model_description import ModelDescription
from replicas.request import FinishReason, GenerationRequest, RequestProgress
from replicas.sampling_params import SamplingParams
from replicas.text.tokenizer import Tokenizer
from router.snapshot import Decision, RoutingRequest
from tests.unit.fake_backend import FakeBackend


class _OneReplicaThatFails(FakeBackend):
    """Its one message holds a token and the failure after it, as a reader that wakes up late gets them."""

    async def generate(
        self, model: str, replica_id: str, request: GenerationRequest, role: Role = "unified"
    ) -> AsyncGenerator[RequestProgress, None]:
        yield RequestProgress(key=request.key, attempt=0, token_ids=(504,), finish_reason=FinishReason.FAILED, error="NaN in layer 3")


class _Fleet(FakeBackend):
    """A new replica for every decision. Each says one token, then ends as told, in order."""

    def __init__(self, *ends: type[ReplicaGone] | FinishReason) -> None:
        super().__init__()
        self._ends = list(ends)

    def decide(self, request: RoutingRequest) -> Decision:
        return Decision(request_id=request.request_id, replica_id=f"r{len(self.acquired)}")

    async def generate(
        self, model: str, replica_id: str, request: GenerationRequest, role: Role = "unified"
    ) -> AsyncGenerator[RequestProgress, None]:
        end = self._ends.pop(0)
        is_last = isinstance(end, FinishReason) and end is not FinishReason.CANCELLED
        yield RequestProgress(key=request.key, attempt=request.attempt, token_ids=(504,), finish_reason=end if is_last else None)
        if isinstance(end, type):
            raise end(replica_id, "as told")
        if not is_last:
            yield RequestProgress(key=request.key, attempt=request.attempt, finish_reason=end)


@pytest.fixture
def model(default_tokenizer: Tokenizer) -> ServedModel:
    description = ModelDescription(max_model_len=100, vocab_size=49_152, block_size=16, dtype="float32", tokenizer_source="x")
    return ServedModel("m", description, default_tokenizer, created_s=0)


def streams_over(
    backend: FakeBackend, model: ServedModel, sleep: Callable[[float], Awaitable[None]], clock: Callable[[], float] = lambda: 0.0
) -> ChoiceStreams:
    params = SamplingParams(max_tokens=5)
    request = GenerationRequest(request_id="a", prompt_ids=(1, 2), params=params, seed=0)
    prepared = PreparedGeneration(response_id="a", model="m", requests=(request,), params=params)
    record = AccessRecord(request_id="a", method="POST", path="/v1/completions", started_s=0.0)
    return ChoiceStreams(prepared, model, backend, record, FailoverPolicy(), clock=clock, sleep=sleep)


async def test_replica_named_again_and_again_is_waited_for_and_then_given_up(model: ServedModel) -> None:
    backend = FakeBackend()
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        assert len(pauses) < 1000, "it goes on for ever"

    async with streams_over(backend, model, sleep, clock=lambda: sum(pauses)) as streams:
        with pytest.raises(Unavailable, match="no replica can take the request"):
            await anext(aiter(streams))
    assert pauses[:6] == [0.0, 0.1, 0.2, 0.4, 0.8, 1.0]
    assert 120 < sum(pauses) < 123  # FailoverPolicy.replica_timeout_s
    assert sorted(backend.acquired) == sorted(backend.released)
    assert not backend.gone, "a replica that drains is not dead"


async def tokens_of(streams: ChoiceStreams) -> int:
    return sum([len(delta.token_ids) async for delta in streams])


async def test_choice_present_at_two_deaths_runs_alone_and_goes_on(model: ServedModel) -> None:
    backend = _Fleet(ReplicaDied, ReplicaDied, FinishReason.LENGTH)
    async with streams_over(backend, model, asyncio.sleep) as streams:
        assert await tokens_of(streams) == 3
    assert [request.is_alone for request in backend.routed] == [False, False, True]
    assert [sorted(request.excluded_replicas) for request in backend.routed] == [[], ["r1"], ["r1", "r2"]]
    assert backend.gone == ["r1", "r2"]


async def test_choice_that_also_kills_the_replica_it_has_alone_is_refused(model: ServedModel) -> None:
    backend = _Fleet(ReplicaDied, ReplicaDied, ReplicaDied)
    async with streams_over(backend, model, asyncio.sleep) as streams:
        with pytest.raises(GenerationFailed, match="3 replicas died while they ran this request"):
            await tokens_of(streams)
    assert sorted(backend.acquired) == sorted(backend.released)


async def test_hung_replica_counts_as_a_death_but_is_no_news_to_the_router(model: ServedModel) -> None:
    backend = _Fleet(ReplicaHung, ReplicaHung, FinishReason.LENGTH)
    async with streams_over(backend, model, asyncio.sleep) as streams:
        assert await tokens_of(streams) == 3
    assert backend.routed[-1].is_alone
    assert not backend.gone


async def test_replicas_that_drain_say_nothing_against_a_choice(model: ServedModel) -> None:
    backend = _Fleet(*[ReplicaLeft, FinishReason.CANCELLED] * 3, FinishReason.LENGTH)
    async with streams_over(backend, model, asyncio.sleep) as streams:
        assert await tokens_of(streams) == 7
    assert not any(request.is_alone for request in backend.routed)


async def test_tokens_in_one_message_with_a_failure_come_before_it_and_its_reason_is_logged_only(
    model: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    async with streams_over(_OneReplicaThatFails(), model, asyncio.sleep) as streams:
        deltas = aiter(streams)
        assert (await anext(deltas)).token_ids == (504,)
        with pytest.raises(GenerationFailed, match="the engine failed while it ran this request; the server's log has the reason"):
            await anext(deltas)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "request a choice 0 failed on only: NaN in layer 3"
    ]
