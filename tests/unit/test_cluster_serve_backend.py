"""The backend over handles that behave as Serve's do when a replica or the router hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.failures import ReplicaGone, ReplicaHung, ReplicaLeft, RouterGone
from cluster.serve.serve_backend import ServeBackend
from cluster.serve.target_unreachable import TargetUnreachable
from replicas.engine_config import Role
from replicas.request import FinishReason, GenerationRequest, RequestProgress
from replicas.sampling_params import SamplingParams
from router.live.batch import Answer, Answers, Batch, Notice, PrefillEnded, ReplicaLost, RequestEnded
from router.live.fences import Fences
from router.snapshot import Decision, RoutingRequest

REQUEST = GenerationRequest(request_id="a", prompt_ids=(1, 2), params=SamplingParams(max_tokens=5), seed=0)


class _Response:
    """What `handle.method.remote()` returns: to be awaited, and cancelled."""

    def __init__(self, work: Any) -> None:
        self.task = asyncio.ensure_future(work)

    def __await__(self) -> Any:
        return self.task.__await__()

    def cancel(self) -> None:
        self.task.cancel()


class _Method:
    def __init__(self, call: Any) -> None:
        self._call = call

    def remote(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class _Router:
    def __init__(self) -> None:
        self.fences = Fences()
        self.callers: list[str] = []
        self.num_renewals = 0
        self.is_hung = False
        self.renew = _Method(lambda *arguments: _Response(self._renew(*arguments)))
        self.is_stopped = False
        self.deliver = _Method(lambda batch: _Response(self._deliver(batch)))
        self.notices: list[Notice] = []

    async def _renew(self, caller: str, seen_version: int) -> Any:
        await self._hang()
        self.num_renewals += 1
        self.callers.append(caller)
        return await self.fences.wait_changed(seen_version, timeout_s=0.05)

    async def wait_renewed(self) -> None:
        """Returns when the renewal that is under way has been answered, and the answer taken: then comes the next one."""
        num_renewals = self.num_renewals
        async with asyncio.timeout(30):
            while self.num_renewals == num_renewals:
                await asyncio.sleep(0)

    async def _deliver(self, batch: Batch) -> Answers:
        await self._hang()
        if self.is_stopped:
            raise asyncio.CancelledError  # how a deployment of Serve answers that ends amid a call
        self.notices += batch.notices
        self.callers += [each.caller for each in (batch, *batch.requests)]
        decisions = [Decision(request_id=request.request_id, replica_id="r") for request in batch.requests]
        return Answers(life="only", answers=tuple(Answer(decision.request_id, decision) for decision in decisions))

    async def _hang(self) -> None:
        if self.is_hung:
            await asyncio.Event().wait()


class _Stream:
    """A token, and then nothing more, or an error."""

    def __init__(self, request: GenerationRequest, error: Exception | None) -> None:
        self.request = request
        self.is_cancelled = False
        self._error = error
        self._num_sent = 0

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> RequestProgress:
        if self._error is not None:
            raise self._error
        self._num_sent += 1
        if self._num_sent > 1:
            await asyncio.Event().wait()
        return RequestProgress(key=self.request.key, attempt=0, token_ids=(7,))

    def cancel(self) -> None:
        self.is_cancelled = True


class _Replicas:
    def __init__(self) -> None:
        self.streams: list[_Stream] = []
        self.error: Exception | None = None
        self.description: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.describe = _Method(lambda: _Response(self._describe()))

    async def _describe(self) -> str:
        return await self.description

    def options(self, **_: Any) -> _Method:
        return _Method(self._generate)

    def _generate(self, request: GenerationRequest) -> _Stream:
        self.streams.append(_Stream(request, self.error))
        return self.streams[-1]


@pytest.fixture
def router() -> _Router:
    return _Router()


@pytest.fixture
async def replicas() -> _Replicas:
    return _Replicas()


@pytest.fixture
async def pools() -> dict[Role, _Replicas]:
    return {"prefill": _Replicas(), "decode": _Replicas()}


@pytest.fixture
async def backend(router: _Router, replicas: _Replicas) -> AsyncIterator[ServeBackend]:
    made = ServeBackend(router, {"m": {"unified": replicas}})
    made.start()
    yield made
    await made.close()


async def test_stream_of_a_replica_that_is_fenced_ends_at_once_and_is_cancelled_there(
    backend: ServeBackend, router: _Router, replicas: _Replicas
) -> None:
    stream = backend.generate("m", "r", REQUEST)
    assert (await anext(stream)).token_ids == (7,)
    following = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    router.fences.set(frozenset({"r"}))
    async with asyncio.timeout(30):
        with pytest.raises(ReplicaHung):
            await following
    assert replicas.streams[0].is_cancelled
    with pytest.raises(ReplicaLeft):  # as long as the fence stands, nothing is sent there
        await anext(backend.generate("m", "r", REQUEST))
    assert len(replicas.streams) == 1


async def test_stream_of_another_replica_goes_on(backend: ServeBackend, router: _Router) -> None:
    stream = backend.generate("m", "r", REQUEST)
    await anext(stream)
    following = asyncio.ensure_future(anext(stream))
    router.fences.set(frozenset({"other"}))
    await router.wait_renewed()
    assert not following.done()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_wait_for_a_hang_ends_with_the_fence_of_that_replica(backend: ServeBackend, router: _Router) -> None:
    waits = [asyncio.ensure_future(backend.wait_hung(replica_id)) for replica_id in ("r", "other")]
    await asyncio.sleep(0)
    router.fences.set(frozenset({"r"}))
    async with asyncio.timeout(30):
        await waits[0]
        await backend.wait_hung("r")
    assert not waits[1].done()
    waits[1].cancel()


async def test_lease_requests_and_decisions_are_under_one_name(backend: ServeBackend, router: _Router, replicas: _Replicas) -> None:
    await backend.acquire(RoutingRequest(request_id="a", model="m", num_prompt_tokens=1, max_tokens=1))
    stream = backend.generate("m", "r", REQUEST)
    await anext(stream)
    await stream.aclose()
    await router.wait_renewed()
    assert set(router.callers) == {replicas.streams[0].request.caller}
    assert replicas.streams[0].request.caller.startswith("gateway-")
    assert replicas.streams[0].is_cancelled


async def test_calls_to_a_router_that_hangs_are_given_up(router: _Router, replicas: _Replicas) -> None:
    router.is_hung = True
    backend = ServeBackend(router, {"m": {"unified": replicas}}, renewal_timeout_s=0.02)
    backend.start()
    async with asyncio.timeout(30):
        with pytest.raises(RouterGone, match="does not answer"):
            await backend.acquire(RoutingRequest(request_id="a", model="m", num_prompt_tokens=1, max_tokens=1))
    await backend.close()


async def test_replica_that_never_took_the_request_has_left(backend: ServeBackend, replicas: _Replicas) -> None:
    replicas.error = TargetUnreachable("replica r is not running")
    with pytest.raises(ReplicaLeft, match="not running"):
        await anext(backend.generate("m", "r", REQUEST))


async def test_ending_of_a_request_closes_its_stream_without_a_cancel(backend: ServeBackend, replicas: _Replicas) -> None:
    stream = backend.generate("m", "r", REQUEST)
    await anext(stream)

    async def last(self: _Stream) -> RequestProgress:
        return RequestProgress(key=REQUEST.key, attempt=0, finish_reason=FinishReason.STOP)

    replicas.streams[0].__class__ = type("_Ending", (_Stream,), {"__anext__": last})
    await anext(stream)
    await stream.aclose()
    assert not replicas.streams[0].is_cancelled


async def test_request_goes_to_the_pool_of_its_role(router: _Router, pools: dict[Role, _Replicas]) -> None:
    backend = ServeBackend(router, {"m": pools})
    await anext(backend.generate("m", "r", REQUEST, "decode"))
    assert [len(pools[role].streams) for role in ("prefill", "decode")] == [0, 1]
    with pytest.raises(ReplicaLeft, match="no pool 'unified' of m"):  # the router still knows replicas of an older configuration
        await anext(backend.generate("m", "r", REQUEST))


async def test_model_is_described_by_the_pool_that_answers_first(router: _Router, pools: dict[Role, _Replicas]) -> None:
    backend = ServeBackend(router, {"m": pools})
    asked = asyncio.ensure_future(backend.describe("m"))
    await asyncio.sleep(0)
    pools["prefill"].description.set_exception(TargetUnreachable("it is not deployed"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not asked.done(), "the other pool may still load"
    pools["decode"].description.set_result("facts")
    assert await asked == "facts"


async def test_model_that_no_pool_describes_is_gone(router: _Router, pools: dict[Role, _Replicas]) -> None:
    for pool in pools.values():
        pool.description.set_exception(TargetUnreachable("it is not deployed"))
    with pytest.raises(ReplicaGone, match="not deployed"):
        await ServeBackend(router, {"m": pools}).describe("m")


async def test_router_hears_of_ends_and_losses_in_order(backend: ServeBackend, router: _Router) -> None:
    backend.release_prefill("a")
    backend.report_gone("r")
    backend.release("a", 7)
    async with asyncio.timeout(30):
        while not router.notices:
            await asyncio.sleep(0)
    assert router.notices == [PrefillEnded("a"), ReplicaLost("r"), RequestEnded("a", 7)]


async def test_call_that_a_stopping_router_cancels_is_made_again_by_whoever_waits(backend: ServeBackend, router: _Router) -> None:
    router.is_stopped = True
    asking = RoutingRequest(request_id="a", model="m", num_prompt_tokens=1, max_tokens=1)
    async with asyncio.timeout(30):
        with pytest.raises(RouterGone, match="cancelled"):
            await backend.acquire(asking)
        router.is_stopped = False
        assert (await backend.acquire(asking)).request_id == "a"
