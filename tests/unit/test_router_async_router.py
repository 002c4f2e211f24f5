"""Callers of the asynchronous router: each gets one answer, and one that leaves keeps no booking."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from replicas.engine_config import Role
from replicas.stats import ReplicaReport, ReplicaStats
from router.config import RouterConfig
from router.live.async_router import AsyncRouter
from router.live.batch import Answer, Answers, RequestEnded
from router.policies.policy import LeastLoaded, PairedPools
from router.router import Router
from router.snapshot import Decision, Rejection, RoutingRequest


def request(name: str, caller: str = "") -> RoutingRequest:
    return RoutingRequest(request_id=name, model="m", num_prompt_tokens=10, max_tokens=5, caller=caller)


def report(replica_id: str = "r", role: Role = "unified") -> ReplicaReport:
    stats = ReplicaStats(num_blocks=100, num_free_blocks=100)
    return ReplicaReport(replica_id=replica_id, model="m", epoch=1, stats=stats, block_size=16, max_num_seqs=2, first_event=0, role=role)


@pytest.fixture
async def router() -> AsyncIterator[AsyncRouter]:
    made = AsyncRouter(Router(RouterConfig(policy="least_loaded", dispatch_ahead=1, no_replica_timeout_s=0.05), PairedPools(LeastLoaded())))
    made.start()
    yield made
    await made.close()


def num_bookings(router: AsyncRouter) -> int:
    view = router.describe()["m"]
    assert isinstance(view, dict)
    return int(view["num_bookings"])


async def acquire(router: AsyncRouter, name: str, caller: str = "g") -> Decision | Rejection | None:
    """The answer to the only request of a gateway."""
    answers = (await router.decide(caller, [request(name, caller)])).answers
    while not answers:
        answers = (await router.wait_answers(caller, timeout_s=30)).answers
    ((_, decision),) = answers
    return decision


async def test_request_with_a_replica_is_answered_and_booked(router: AsyncRouter) -> None:
    router.apply_report(report())
    answer = await acquire(router, "a")
    assert isinstance(answer, Decision)
    assert answer.replica_id == "r"
    assert num_bookings(router) == 1
    router.release("a", 3)
    assert num_bookings(router) == 0


async def test_request_before_the_first_report_waits_for_it(router: AsyncRouter) -> None:
    waiting = asyncio.create_task(acquire(router, "a"))
    await asyncio.sleep(0)
    router.apply_report(report())
    assert isinstance(await waiting, Decision)


async def test_request_without_any_replica_is_rejected_as_unavailable(router: AsyncRouter) -> None:
    answer = await acquire(router, "a")
    assert isinstance(answer, Rejection)
    assert answer.is_unavailable


async def test_requests_that_are_released_leave_queue_and_bookings(router: AsyncRouter) -> None:
    router.apply_report(report())
    await router.decide("g", [request(str(index), "g") for index in range(20)])
    for index in range(20):
        router.release(str(index), 0)
    await asyncio.sleep(0)
    assert num_bookings(router) == 0
    assert isinstance(await acquire(router, "next", "h"), Decision)


@pytest.mark.parametrize("is_released", [True, False])
async def test_id_that_is_asked_for_again_while_it_waits_is_answered_and_booked_once(router: AsyncRouter, is_released: bool) -> None:
    await router.decide("g", [request("a", "g")])
    if is_released:
        router.release("a", 0)
    again = asyncio.create_task(acquire(router, "a"))
    await asyncio.sleep(0)
    router.apply_report(report())
    assert isinstance(await again, Decision)
    assert not (await router.wait_answers("g", timeout_s=30)).is_known, "there is no second answer"
    assert num_bookings(router) == 1


async def test_health_tells_when_the_pump_has_died(router: AsyncRouter) -> None:
    router.check_health()
    await router.close()
    with pytest.raises(RuntimeError, match="closed"):
        router.check_health()


async def test_release_prefill_ends_one_side_of_a_pair_and_spares_a_resend_that_waits(router: AsyncRouter) -> None:
    router.apply_report(report("p", "prefill"))
    router.apply_report(report("d", "decode"))
    answer = await acquire(router, "a")
    assert isinstance(answer, Decision)
    assert (answer.prefill_replica_id, answer.replica_id) == ("p", "d")
    router.release_prefill("a")
    router.release_prefill("nobody")
    assert (num_bookings(router), router.statistics()["m"].num_prefill_bookings) == (1, 0)
    router.remove_replica("p")
    router.remove_replica("d")
    again = asyncio.create_task(acquire(router, "a"))
    await asyncio.sleep(0)
    router.release_prefill("a")  # of the older attempt
    router.apply_report(report("r"))
    answer = await again
    assert isinstance(answer, Decision)
    assert answer.replica_id == "r"


def answered(answers: Answers) -> list[str]:
    assert all(isinstance(answer.decision, Decision) for answer in answers.answers)
    return [answer.request_id for answer in answers.answers]


async def asked(router: AsyncRouter, name: str) -> tuple[Answer, ...]:
    """All that "g" hears when it asks for one more, which has to wait, until something was decided."""
    at_once = (await router.decide("g", [request(name, "g")])).answers
    while not any(isinstance(answer.decision, Decision) for answer in at_once):
        at_once += (await router.wait_answers("g", timeout_s=30)).answers
    return at_once


@pytest.fixture
async def crowded(router: AsyncRouter) -> AsyncRouter:
    """With one replica, and seven requests of gateway "g", of which it takes three."""
    router.apply_report(report())
    first = answered(await router.decide("g", [request(name, "g") for name in "abcdefg"]))
    assert first + answered(await router.wait_answers("g", timeout_s=30)) == ["a", "b", "c"]
    return router


async def test_batch_what_has_to_wait_holds_nothing_back_and_is_answered_as_it_is_decided(crowded: AsyncRouter) -> None:
    for ended, following in ("ad", "be"):
        crowded.note(RequestEnded(ended, 5))
        assert answered(await crowded.wait_answers("g", timeout_s=30)) == [following]


async def test_batch_brings_what_was_decided_of_earlier_ones(crowded: AsyncRouter) -> None:
    crowded.note(RequestEnded("a", 5))
    assert [answer.request_id for answer in await asked(crowded, "h")] == ["d"]


async def test_batch_tells_nothing_of_other_gateways(crowded: AsyncRouter) -> None:
    crowded.note(RequestEnded("a", 5))
    assert not (await crowded.decide("h", [request("x", "h")])).answers
    assert answered(await crowded.wait_answers("g", timeout_s=30)) == ["d"]


async def test_batch_request_that_is_released_leaves_the_queue_and_the_others_stay(crowded: AsyncRouter) -> None:
    crowded.note(RequestEnded("d", 0))
    crowded.note(RequestEnded("a", 5))
    answers = await asked(crowded, "h")
    assert [(answer.request_id, answer.decision is None) for answer in answers] == [("d", True), ("e", False)]
    assert num_bookings(crowded) == 3


async def test_batch_id_that_is_asked_anew_is_answered_once(crowded: AsyncRouter) -> None:
    crowded.note(RequestEnded("d", 0))
    assert not (await crowded.decide("g", [request("d", "g")])).answers
    for name in "efga":
        crowded.note(RequestEnded(name, 5))
    answers = await asked(crowded, "h")
    assert [answer.request_id for answer in answers if isinstance(answer.decision, Decision)] == ["d"]
    assert [answer.request_id for answer in answers].count("d") == 1


async def test_batch_gateway_that_stops_waiting_leaves_the_queue(crowded: AsyncRouter) -> None:
    waiting = asyncio.create_task(crowded.wait_answers("g", timeout_s=30))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    for name in "abc":
        crowded.note(RequestEnded(name, 5))
    assert answered(await crowded.decide("h", [request("x", "h")])) == ["x"]
    assert num_bookings(crowded) == 1


async def test_batch_id_that_is_asked_anew_before_its_answer_was_taken_gets_the_newer_one(crowded: AsyncRouter) -> None:
    for name in "efga":
        crowded.note(RequestEnded(name, 5))
    await crowded.decide("h", [request("x", "h")])  # "d" is decided in this step, and nobody takes the answer
    crowded.remove_replica("r")
    crowded.apply_report(report("s"))
    answers = (await crowded.decide("g", [request("d", "g")])).answers
    assert [answer.decision.replica_id for answer in answers if isinstance(answer.decision, Decision)] == ["s"]


async def test_batch_of_a_gateway_whose_lease_ended_is_given_up_and_it_hears_so(crowded: AsyncRouter) -> None:
    waiting = asyncio.create_task(crowded.wait_answers("g", timeout_s=30))
    await asyncio.sleep(0)
    assert crowded.release_caller("g") == 7
    assert sorted((await waiting).answers) == [Answer(name, None) for name in "defg"]
    assert num_bookings(crowded) == 0


async def test_gateway_that_dies_makes_room_for_others(crowded: AsyncRouter) -> None:
    other = asyncio.create_task(acquire(crowded, "x", "h"))
    await asyncio.sleep(0)
    assert crowded.release_caller("g") == 7
    assert isinstance(await other, Decision)
    assert num_bookings(crowded) == 1


async def test_batch_of_a_dead_gateway_leaves_nothing_behind(crowded: AsyncRouter) -> None:
    crowded.release_caller("g")
    await asyncio.sleep(0)
    assert not (await crowded.wait_answers("g", timeout_s=30)).is_known


async def test_wait_for_answers_of_a_gateway_that_is_owed_none_says_so(router: AsyncRouter) -> None:
    assert not (await router.wait_answers("g", timeout_s=30)).is_known


async def test_wait_for_answers_without_any_ends_in_time(crowded: AsyncRouter) -> None:
    answers = await crowded.wait_answers("g", timeout_s=0.01)
    assert answers.is_known
    assert not answers.answers
