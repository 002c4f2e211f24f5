"""What the gateway asks the router, and how long it goes on asking."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.failures import ModelRemoved, Overloaded, RouterGone, Unavailable
from cluster.generation.decisions import Decisions
from cluster.models.served_model import ServedModel
from cluster.settings.failover import FailoverPolicy
from replicas.model_description import ModelDescription
from replicas.request import GenerationRequest
from replicas.sampling_params import SamplingParams
from replicas.text.tokenizer import Tokenizer
from router.snapshot import Decision, Rejection, RejectionKind, RoutingRequest
from tests.unit.fake_backend import FakeBackend

PARAMS = SamplingParams(max_tokens=5)
REQUEST = GenerationRequest(request_id="a", prompt_ids=tuple(range(40)), params=PARAMS, seed=0, priority=3, tenant="acme", arrival_s=12.0)


class _Router(FakeBackend):
    """Answers in the given order, and then always decides."""

    def __init__(self, *answers: Exception | Rejection) -> None:
        super().__init__()
        self._answers: Iterator[Exception | Rejection] = iter(answers)

    async def acquire(self, request: RoutingRequest) -> Decision | Rejection:
        self.routed.append(request)
        answer = next(self._answers, None)
        if isinstance(answer, Exception):
            raise answer
        return answer or self.decide(request)


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return sum(self.pauses)

    async def sleep(self, seconds: float) -> None:
        assert len(self.pauses) < 10_000, "it goes on for ever"
        self.pauses.append(seconds)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def model(default_tokenizer: Tokenizer) -> ServedModel:
    description = ModelDescription(max_model_len=100, vocab_size=49_152, block_size=16, dtype="float32", tokenizer_source="x")
    return ServedModel("m", description, default_tokenizer, created_s=0)


def rejection(kind: RejectionKind) -> Rejection:
    return Rejection(request_id="a", reason="as told", retry_after_s=4.0, kind=kind)


async def test_router_hears_of_size_prefix_and_rights_of_all_choices(model: ServedModel, time: Time) -> None:
    router = _Router()
    await Decisions(router, model, FailoverPolicy(), time, time.sleep).first(REQUEST, num_choices=3)
    (asked,) = router.routed
    assert (asked.model, asked.num_prompt_tokens, asked.max_tokens, asked.num_choices) == ("m", 40, 15, 3)
    assert len(asked.block_keys) == 2, "two full blocks of 16"
    assert (asked.priority, asked.tenant, asked.arrival_s) == (3, "acme", 12.0)
    assert (asked.excluded_replicas, asked.is_alone, asked.is_whole) == (frozenset(), False, False)


@pytest.mark.parametrize(("is_alone", "is_whole"), [(False, False), (True, True)])
async def test_choice_that_moves_names_whom_it_lost_and_alone_means_no_pair(
    model: ServedModel, time: Time, is_alone: bool, is_whole: bool
) -> None:
    router = _Router()
    await Decisions(router, model, FailoverPolicy(), time, time.sleep).another(REQUEST, excluded=frozenset({"r"}), is_alone=is_alone)
    (asked,) = router.routed
    assert (asked.num_choices, asked.excluded_replicas, asked.is_alone, asked.is_whole) == (1, {"r"}, is_alone, is_whole)


async def test_router_that_comes_back_is_asked_again(model: ServedModel, time: Time) -> None:
    router = _Router(*[RouterGone("restarting")] * 6)
    decision = await Decisions(router, model, FailoverPolicy(), time, time.sleep).first(REQUEST, num_choices=1)
    assert decision.replica_id == "only"
    assert time.pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


async def test_router_that_stays_away_makes_the_request_unavailable_within_its_time(model: ServedModel, time: Time) -> None:
    router = _Router(*[RouterGone("restarting")] * 1000)
    with pytest.raises(Unavailable, match="the router is restarting"):
        await Decisions(router, model, FailoverPolicy(router_timeout_s=3.0), time, time.sleep).first(REQUEST, num_choices=1)
    assert 2.0 < time() <= 3.0


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        ("queue_full", Overloaded),
        ("tenant_limit", Overloaded),
        ("predicted_wait", Overloaded),
        ("no_replica", Unavailable),
        ("not_served", ModelRemoved),
    ],
)
async def test_new_request_that_is_rejected_fails_at_once(
    model: ServedModel, time: Time, kind: RejectionKind, raised: type[Overloaded | Unavailable]
) -> None:
    with pytest.raises(raised, match="as told") as error:
        await Decisions(_Router(rejection(kind)), model, FailoverPolicy(), time, time.sleep).first(REQUEST, num_choices=1)
    assert error.value.retry_after_s == 4.0
    assert time.pauses == []


async def test_choice_that_moves_outwaits_the_want_of_replicas(model: ServedModel, time: Time) -> None:
    router = _Router(*[rejection("no_replica")] * 50)
    decision = await Decisions(router, model, FailoverPolicy(), time, time.sleep).another(REQUEST, excluded=frozenset(), is_alone=False)
    assert decision.replica_id == "only"
    assert len(time.pauses) == 50


async def test_choice_that_moves_gives_up_after_the_policys_time(model: ServedModel, time: Time) -> None:
    router = _Router(*[rejection("no_replica")] * 10_000)
    with pytest.raises(Unavailable):
        await Decisions(router, model, FailoverPolicy(replica_timeout_s=7.0), time, time.sleep).another(
            REQUEST, excluded=frozenset(), is_alone=False
        )
    assert 7.0 <= time() <= 7.2


async def test_choice_that_moves_ends_at_once_when_its_model_was_removed(model: ServedModel, time: Time) -> None:
    with pytest.raises(ModelRemoved, match="as told"):
        await Decisions(_Router(rejection("no_replica"), rejection("not_served")), model, FailoverPolicy(), time, time.sleep).another(
            REQUEST, excluded=frozenset(), is_alone=False
        )
    assert len(time.pauses) == 1


async def test_choice_that_moves_is_not_kept_when_the_router_is_overloaded(model: ServedModel, time: Time) -> None:
    with pytest.raises(Overloaded):
        await Decisions(_Router(rejection("queue_full")), model, FailoverPolicy(), time, time.sleep).another(
            REQUEST, excluded=frozenset(), is_alone=False
        )
    assert time.pauses == []
