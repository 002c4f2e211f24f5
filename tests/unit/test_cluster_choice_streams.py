"""Choices over a backend whose replicas and router fail as told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from cluster.access_log import AccessRecord
from cluster.backend import ReplicaGone
from cluster.choice_streams import ChoiceStreams, FailoverPolicy
from cluster.errors import GenerationFailed, Unavailable
from cluster.prepared_generation import PreparedGeneration
from cluster.served_model import ServedModel
from replicas.model_description import ModelDescription
from replicas.request import FinishReason, GenerationRequest, RequestProgress
from replicas.sampling_params import SamplingParams
from replicas.text.tokenizer import Tokenizer
from router.snapshot import Decision, Rejection, RoutingRequest


class _OneReplicaThatRefuses:
    """The router knows no other replica, and that one takes nothing."""

    def __init__(self) -> None:
        self.acquired: list[str] = []
        self.released: list[str] = []

    async def describe(self, model: str) -> ModelDescription:
        raise ReplicaGone("any", "not asked for here")

    async def acquire(self, request: RoutingRequest) -> Decision | Rejection:
        self.acquired.append(request.request_id)
        return Decision(request_id=request.request_id, replica_id="only")

    async def generate(self, model: str, replica_id: str, request: GenerationRequest) -> AsyncGenerator[RequestProgress, None]:
        for progress in ():
            yield progress
        raise ReplicaGone(replica_id, "it drains")

    def release(self, request_id: str, num_output_tokens: int) -> None:
        self.released.append(request_id)

    def report_gone(self, replica_id: str) -> None:
        return None

    async def describe_router(self) -> dict[str, Any]:
        return {}


class _OneReplicaThatFails(_OneReplicaThatRefuses):
    """Its one message holds a token and the failure after it, as a reader that wakes up late gets them."""

    async def generate(self, model: str, replica_id: str, request: GenerationRequest) -> AsyncGenerator[RequestProgress, None]:
        yield RequestProgress(key=request.key, attempt=0, token_ids=(504,), finish_reason=FinishReason.FAILED, error="NaN")


@pytest.fixture
def model(default_tokenizer: Tokenizer) -> ServedModel:
    description = ModelDescription(max_model_len=100, vocab_size=49_152, block_size=16, dtype="float32", tokenizer_source="x")
    return ServedModel("m", description, default_tokenizer, created_s=0)


def streams_over(backend: _OneReplicaThatRefuses, model: ServedModel, sleep: Callable[[float], Awaitable[None]]) -> ChoiceStreams:
    params = SamplingParams(max_tokens=5)
    request = GenerationRequest(request_id="a", prompt_ids=(1, 2), params=params, seed=0)
    prepared = PreparedGeneration(response_id="a", model="m", requests=(request,), params=params)
    record = AccessRecord(request_id="a", method="POST", path="/v1/completions", started_s=0.0)
    return ChoiceStreams(prepared, model, backend, record, FailoverPolicy(), sleep=sleep)


async def test_replica_named_again_and_again_is_waited_for_and_then_given_up(model: ServedModel) -> None:
    backend = _OneReplicaThatRefuses()
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        assert len(pauses) < 1000, "it goes on for ever"

    async with streams_over(backend, model, sleep) as streams:
        with pytest.raises(Unavailable, match="no replica can take the request"):
            await anext(aiter(streams))
    assert pauses[:5] == [0.1, 0.2, 0.4, 0.8, 1.0]
    assert 10 < sum(pauses) < 30
    assert sorted(backend.acquired) == sorted(backend.released)


async def test_tokens_in_one_message_with_a_failure_come_before_it(model: ServedModel) -> None:
    async with streams_over(_OneReplicaThatFails(), model, asyncio.sleep) as streams:
        deltas = aiter(streams)
        assert (await anext(deltas)).token_ids == (504,)
        with pytest.raises(GenerationFailed, match="NaN"):
            await anext(deltas)
