"""Callers of the asynchronous router: each gets one answer, and one that leaves keeps no booking."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from replicas.engine_config import Role
from replicas.stats import ReplicaReport, ReplicaStats
from router.async_router import AsyncRouter
from router.config import RouterConfig
from router.policies import LeastLoaded, PairedPools
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


async def test_acquire_with_a_replica_answers_and_books(router: AsyncRouter) -> None:
    router.apply_report(report())
    answer = await router.acquire(request("a"))
    assert isinstance(answer, Decision)
    assert answer.replica_id == "r"
    assert num_bookings(router) == 1
    router.release("a", 3)
    assert num_bookings(router) == 0


async def test_acquire_before_the_first_report_waits_for_it(router: AsyncRouter) -> None:
    waiting = asyncio.create_task(router.acquire(request("a")))
    await asyncio.sleep(0)
    router.apply_report(report())
    assert isinstance(await waiting, Decision)


async def test_acquire_without_any_replica_is_rejected_as_unavailable(router: AsyncRouter) -> None:
    answer = await router.acquire(request("a"))
    assert isinstance(answer, Rejection)
    assert answer.is_unavailable


async def test_cancelled_caller_leaves_queue_and_bookings(router: AsyncRouter) -> None:
    router.apply_report(report())
    calls = [asyncio.create_task(router.acquire(request(str(index)))) for index in range(20)]
    await asyncio.sleep(0.01)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    for index in range(20):  # what a gateway does for every request, answered or not
        router.release(str(index), 0)
    await asyncio.sleep(0)
    assert num_bookings(router) == 0
    assert isinstance(await router.acquire(request("next")), Decision)


async def test_release_of_a_waiting_request_takes_it_out(router: AsyncRouter) -> None:
    call = asyncio.create_task(router.acquire(request("a")))
    await asyncio.sleep(0)
    router.release("a", 0)
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_id_that_is_released_and_asked_for_again_at_once_is_answered(router: AsyncRouter) -> None:
    first = asyncio.create_task(router.acquire(request("a")))
    await asyncio.sleep(0)
    second = asyncio.create_task(router.acquire(request("a")))  # runs after the release, before the first caller wakes up
    router.release("a", 0)
    await asyncio.gather(first, return_exceptions=True)
    router.apply_report(report())
    async with asyncio.timeout(30):
        assert isinstance(await second, Decision)
    assert first.cancelled()
    assert num_bookings(router) == 1


async def test_id_that_waits_already_is_taken_over_by_the_newer_call(router: AsyncRouter) -> None:
    older = asyncio.create_task(router.acquire(request("a")))
    await asyncio.sleep(0)
    newer = asyncio.create_task(router.acquire(request("a")))
    await asyncio.gather(older, return_exceptions=True)
    assert older.cancelled()
    router.apply_report(report())
    async with asyncio.timeout(30):
        assert isinstance(await newer, Decision)
    assert num_bookings(router) == 1


async def test_dead_caller_loses_what_it_waits_for_and_what_it_booked(router: AsyncRouter) -> None:
    router.apply_report(report())
    await router.acquire(request("booked", "g"))
    waiting = asyncio.create_task(router.acquire(request("waiting", "g")))
    other = asyncio.create_task(router.acquire(request("other", "h")))
    await asyncio.sleep(0)
    assert router.release_caller("g") == 2
    async with asyncio.timeout(30):
        assert isinstance(await other, Decision)
    assert waiting.cancelled() or waiting.cancelling() or waiting.done()
    assert num_bookings(router) == 1


async def test_health_tells_when_the_pump_has_died(router: AsyncRouter) -> None:
    router.check_health()
    await router.close()
    with pytest.raises(RuntimeError, match="closed"):
        router.check_health()


async def test_release_prefill_ends_one_side_of_a_pair_and_spares_a_resend_that_waits(router: AsyncRouter) -> None:
    router.apply_report(report("p", "prefill"))
    router.apply_report(report("d", "decode"))
    answer = await router.acquire(request("a"))
    assert isinstance(answer, Decision)
    assert (answer.prefill_replica_id, answer.replica_id) == ("p", "d")
    router.release_prefill("a")
    router.release_prefill("nobody")
    assert (num_bookings(router), router.statistics()["m"].num_prefill_bookings) == (1, 0)
    router.remove_replica("p")
    router.remove_replica("d")
    again = asyncio.create_task(router.acquire(request("a")))
    await asyncio.sleep(0)
    router.release_prefill("a")  # of the older attempt
    router.apply_report(report("r"))
    answer = await again
    assert isinstance(answer, Decision)
    assert answer.replica_id == "r"
