"""A choice followed through replicas that fail as told, as its reader and its observers see it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from cluster.failures import GenerationFailed, ReplicaDied, ReplicaGone, ReplicaHung, ReplicaLeft, Unavailable
from cluster.generation.choice_delta import ChoiceDelta
from cluster.generation.choice_run import ChoiceRun, Surroundings
from cluster.generation.decisions import Decisions
from cluster.generation.pair_stream import PrefillBooking
from cluster.generation.prompt_scores import PromptScores
from cluster.generation.request_events import Dispatched, Lost, Moved, RequestEvent, Resumed
from cluster.models.served_model import ServedModel
from cluster.settings.failover import FailoverPolicy
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


REQUEST = GenerationRequest(request_id="a", prompt_ids=(1, 2), params=SamplingParams(max_tokens=9), seed=0)


@dataclass
class Choice:
    """One choice over `backend`, what its reader got, and what was told of it."""

    backend: FakeBackend
    model: ServedModel
    clock: Callable[[], float] = lambda: 0.0
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    scores: PromptScores | None = None
    deltas: list[ChoiceDelta] = field(default_factory=list)
    events: list[RequestEvent] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(delta.token_ids) for delta in self.deltas)

    async def run(self) -> None:
        policy = FailoverPolicy()
        decisions = Decisions(self.backend, self.model, policy, self.clock, self.sleep)

        async def put(delta: ChoiceDelta) -> None:
            self.deltas.append(delta)

        around = Surroundings(
            model=self.model, backend=self.backend, decisions=decisions, policy=policy, emit=self.events.append, put=put,
            clock=self.clock, sleep=self.sleep,
        )  # fmt: skip
        decision = await decisions.first(REQUEST, num_choices=1)
        await ChoiceRun(REQUEST, 4, around, self.scores).run(decision, PrefillBooking(self.backend, decision, 1))

    def check_all_but_the_first_booking_released(self) -> None:
        """That one is its prompt's, for all choices."""
        assert sorted(self.backend.acquired[1:]) == sorted(self.backend.released)


async def test_replica_named_again_and_again_is_waited_for_and_then_given_up(model: ServedModel) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        assert len(pauses) < 1000, "it goes on for ever"

    choice = Choice(FakeBackend(), model, clock=lambda: sum(pauses), sleep=sleep)
    with pytest.raises(Unavailable, match="no replica can take the request"):
        await choice.run()
    assert pauses[:6] == [0.0, 0.1, 0.2, 0.4, 0.8, 1.0]
    assert 120 < sum(pauses) < 123  # FailoverPolicy.replica_timeout_s
    choice.check_all_but_the_first_booking_released()
    assert not choice.backend.gone, "a replica that drains is not dead"


async def test_choice_present_at_two_deaths_runs_alone_and_goes_on(model: ServedModel) -> None:
    choice = Choice(_Fleet(ReplicaDied, ReplicaDied, FinishReason.LENGTH), model)
    await choice.run()
    assert choice.num_tokens == 3
    routed = choice.backend.routed
    assert [request.is_alone for request in routed] == [False, False, True]
    assert [sorted(request.excluded_replicas) for request in routed] == [[], ["r1"], ["r1", "r2"]]
    assert choice.backend.gone == ["r1", "r2"]
    choice.check_all_but_the_first_booking_released()


async def test_choice_that_moves_tells_each_step_of_it_with_its_index(model: ServedModel) -> None:
    now_s = iter(range(100))
    choice = Choice(_Fleet(ReplicaLeft, FinishReason.LENGTH), model, clock=lambda: float(next(now_s)))
    await choice.run()
    dispatched, lost, moved, dispatched_again, resumed = choice.events
    assert isinstance(dispatched, Dispatched)
    assert (dispatched.index, dispatched.replica_id, dispatched.part) == (4, "r1", "whole")
    assert isinstance(lost, Lost)
    assert (lost.index, lost.replica_id) == (4, "r1")
    assert isinstance(moved, Moved)
    assert isinstance(dispatched_again, Dispatched)
    assert dispatched_again.replica_id == "r2"
    assert isinstance(resumed, Resumed)
    assert 0 < resumed.pause_s <= resumed.at_s - dispatched.at_s
    assert [event.at_s for event in choice.events] == sorted(event.at_s for event in choice.events)


async def test_choice_that_also_kills_the_replica_it_has_alone_is_refused(model: ServedModel) -> None:
    choice = Choice(_Fleet(ReplicaDied, ReplicaDied, ReplicaDied), model)
    with pytest.raises(GenerationFailed, match="3 replicas died while they ran this request"):
        await choice.run()
    choice.check_all_but_the_first_booking_released()


async def test_hung_replica_counts_as_a_death_but_is_no_news_to_the_router(model: ServedModel) -> None:
    choice = Choice(_Fleet(ReplicaHung, ReplicaHung, FinishReason.LENGTH), model)
    await choice.run()
    assert choice.num_tokens == 3
    assert choice.backend.routed[-1].is_alone
    assert not choice.backend.gone


async def test_replicas_that_drain_say_nothing_against_a_choice(model: ServedModel) -> None:
    choice = Choice(_Fleet(*[ReplicaLeft, FinishReason.CANCELLED] * 3, FinishReason.LENGTH), model)
    await choice.run()
    assert choice.num_tokens == 7
    assert not any(request.is_alone for request in choice.backend.routed)


async def test_tokens_in_one_message_with_a_failure_come_before_it_and_its_reason_is_logged_only(
    model: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    choice = Choice(_OneReplicaThatFails(), model)
    with pytest.raises(GenerationFailed, match="the engine failed while it ran this request; the server's log has the reason"):
        await choice.run()
    assert [delta.token_ids for delta in choice.deltas] == [(504,)]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "request a choice 0 failed on only: NaN in layer 3"
    ]


async def test_choice_that_ends_without_the_scores_its_siblings_wait_for_has_failed(model: ServedModel) -> None:
    choice = Choice(_Fleet(FinishReason.LENGTH), model, scores=PromptScores(is_all=False))
    with pytest.raises(GenerationFailed, match="no log-probabilities of the prompt"):
        await choice.run()
    assert choice.deltas == []
