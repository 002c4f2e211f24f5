"""The engine thread seen from asyncio: endings, cancels, attempts, health. The engine is the echo engine."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from replicas.engine.async_engine import AsyncEngine
from replicas.request import FinishReason, GenerationRequest, RequestProgress, RequestRejected, StepOutput
from replicas.sampling_params import SamplingParams
from replicas.stats import HandoffStats, ReplicaStats
from replicas.step_engine import EngineUnhealthy
from tests.unit.fake_engine import EchoEngine


class LendingEngine(EchoEngine):
    """One whose blocks are read by others, and whose steps wait for them until somebody wakes it."""

    def __init__(self, num_leases: int) -> None:
        super().__init__(eos_token_id=0, vocab_size=100)
        self.num_leases = num_leases
        self.num_taken = 0  # of them, since the last step
        self.waits, self.woken = threading.Event(), threading.Event()

    @property
    def has_work(self) -> bool:
        return super().has_work or self.num_leases > 0

    def step(self) -> StepOutput:
        if not super().has_work:
            self.waits.set()
            self.woken.wait()
            self.woken.clear()
        self.num_leases, self.num_taken = self.num_leases - self.num_taken, 0
        return super().step()

    def wake(self) -> None:
        self.woken.set()

    def stats(self) -> ReplicaStats:
        return replace(super().stats(), handoffs=HandoffStats(num_leases=self.num_leases))


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def echo() -> EchoEngine:
    return EchoEngine(eos_token_id=0, vocab_size=100)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def engine(echo: EchoEngine, clock: Clock) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(lambda: echo, progress_deadline_s=10.0, clock=clock)
    await engine.start()
    yield engine
    await engine.shutdown()


def _request(name: str = "a", prompt: tuple[int, ...] = (1, 2, 3), **fields: object) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_ids=prompt, params=SamplingParams(max_tokens=None), seed=0, **fields)


async def _collect(engine: AsyncEngine, request: GenerationRequest) -> list[RequestProgress]:
    return [progress async for progress in engine.generate(request)]


def _tokens(progress: list[RequestProgress]) -> list[int]:
    return [token_id for item in progress for token_id in item.token_ids]


async def test_generate_yields_all_tokens_and_one_ending(engine: AsyncEngine) -> None:
    progress = await _collect(engine, _request())
    assert _tokens(progress) == [1, 2, 3, 0]
    assert [item.finish_reason for item in progress if item.finish_reason] == [FinishReason.STOP]


async def test_slow_reader_gets_everything_that_was_ready_in_one_item(engine: AsyncEngine, echo: EchoEngine) -> None:
    stream = engine.generate(_request(prompt=tuple(range(1, 30))))
    first = await anext(stream)
    async with asyncio.timeout(30):
        while engine.stats().num_finished == 0:
            await asyncio.sleep(0.005)
    rest = [item async for item in stream]
    assert len(rest) <= 1, "tokens that were ready came apart"
    assert _tokens([first, *rest]) == [*range(1, 30), 0]


async def test_closing_the_stream_cancels_and_frees_the_blocks(engine: AsyncEngine, echo: EchoEngine) -> None:
    echo.gate.clear()
    task = asyncio.create_task(_collect(engine, _request(prompt=tuple(range(1, 90)))))
    async with asyncio.timeout(30):
        while engine.stats().num_waiting + engine.stats().num_running == 0:
            await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(30):
        while engine.stats().num_cancelled == 0:
            await asyncio.sleep(0.005)
    assert echo.pool.num_free == echo.pool.num_blocks


async def test_cancel_by_id_ends_each_choice_as_cancelled(engine: AsyncEngine, echo: EchoEngine) -> None:
    echo.gate.clear()
    tasks = [asyncio.create_task(_collect(engine, _request(choice=choice))) for choice in range(2)]
    await asyncio.sleep(0)
    assert engine.cancel("a") == 2
    for progress in await asyncio.gather(*tasks):
        assert progress[-1].finish_reason is FinishReason.CANCELLED


async def test_newer_attempt_takes_the_place_of_the_older(engine: AsyncEngine, echo: EchoEngine) -> None:
    echo.gate.clear()
    older = asyncio.create_task(_collect(engine, _request()))
    await asyncio.sleep(0)
    newer = asyncio.create_task(_collect(engine, _request(attempt=1, output_ids=(1,))))
    await asyncio.sleep(0)
    echo.gate.set()
    assert (await older)[-1].finish_reason is FinishReason.CANCELLED
    assert _tokens(await newer) == [2, 3, 0]


async def test_same_attempt_twice_is_rejected_and_the_first_goes_on(engine: AsyncEngine, echo: EchoEngine) -> None:
    echo.gate.clear()
    first = asyncio.create_task(_collect(engine, _request()))
    await asyncio.sleep(0)
    with pytest.raises(RequestRejected, match="already running"):
        await _collect(engine, _request())
    echo.gate.set()
    assert _tokens(await first) == [1, 2, 3, 0]


async def test_rejected_request_raises_where_it_was_made(engine: AsyncEngine) -> None:
    with pytest.raises(RequestRejected, match="vocabulary"):
        await _collect(engine, _request(prompt=(1000,)))
    assert _tokens(await _collect(engine, _request())) == [1, 2, 3, 0]


async def test_health_is_progress_and_not_idleness(
    engine: AsyncEngine, echo: EchoEngine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.now_s = 1e6
    engine.check_health()  # idle for long is healthy
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang() -> StepOutput:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
        return StepOutput()

    monkeypatch.setattr(echo, "step", hang)
    task = asyncio.create_task(_collect(engine, _request()))
    await asyncio.sleep(0)
    engine.check_health()
    clock.now_s += 11
    with pytest.raises(EngineUnhealthy, match="no step finished for 11 s"):
        engine.check_health()
    monkeypatch.undo()
    release.set()
    await task
    engine.check_health()


async def test_step_that_raises_what_nobody_expected_ends_all_streams_and_health(
    engine: AsyncEngine, echo: EchoEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug() -> StepOutput:
        raise KeyError("bug")

    monkeypatch.setattr(echo, "step", bug)
    with pytest.raises(EngineUnhealthy, match="KeyError"):
        await _collect(engine, _request())
    with pytest.raises(EngineUnhealthy):
        engine.check_health()
    with pytest.raises(EngineUnhealthy):
        await _collect(engine, _request("b"))


async def test_failing_load_raises_from_start() -> None:
    def load() -> EchoEngine:
        raise ValueError("max_model_len must be lower")

    engine = AsyncEngine(load)
    with pytest.raises(ValueError, match="must be lower"):
        await engine.start()
    with pytest.raises(EngineUnhealthy):
        engine.check_health()
    await engine.shutdown()


async def test_shutdown_ends_running_streams_as_cancelled(echo: EchoEngine) -> None:
    engine = AsyncEngine(lambda: echo)
    await engine.start()
    echo.gate.clear()
    task = asyncio.create_task(_collect(engine, _request()))
    await asyncio.sleep(0)
    await engine.shutdown()
    assert (await task)[-1].finish_reason is FinishReason.CANCELLED


async def test_kv_changes_are_read_between_steps(engine: AsyncEngine) -> None:
    await _collect(engine, _request(prompt=tuple(range(1, 40))))
    changes = await engine.kv_changes(0)
    assert len(changes.events) >= 2
    later = await engine.kv_changes(changes.first_event + len(changes.events))
    assert replace(later, first_event=0).events == ()


@pytest.mark.parametrize("end", ["dies", "is shut down"])
async def test_kv_changes_that_wait_for_a_step_end_with_the_engine(
    echo: EchoEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    engine = AsyncEngine(lambda: echo)
    await engine.start()
    in_step, go_on = threading.Event(), threading.Event()

    def step() -> StepOutput:
        in_step.set()
        go_on.wait(5)
        if end == "dies":
            raise KeyError("bug")
        return StepOutput()

    monkeypatch.setattr(echo, "step", step)
    running = asyncio.create_task(_collect(engine, _request()))
    await asyncio.to_thread(in_step.wait, 5)
    shutdown = asyncio.create_task(engine.shutdown()) if end == "is shut down" else None
    await asyncio.sleep(0)
    reading = asyncio.create_task(engine.kv_changes(0))
    await asyncio.sleep(0)
    go_on.set()
    async with asyncio.timeout(30):
        with pytest.raises(EngineUnhealthy):
            await reading
        await asyncio.gather(running, return_exceptions=True)
        await (shutdown or engine.shutdown())


async def test_requests_of_a_dead_caller_are_cancelled_and_no_others(engine: AsyncEngine, echo: EchoEngine) -> None:
    echo.gate.clear()
    tasks = [
        asyncio.create_task(_collect(engine, _request(name, caller=caller)))
        for name, caller in (("a", "g"), ("b", "g"), ("c", "h"), ("d", ""))
    ]
    await asyncio.sleep(0)
    assert engine.callers == ("g", "h")
    assert engine.cancel_callers({"g"}) == 2
    echo.gate.set()
    endings = [(await task)[-1].finish_reason for task in tasks]
    assert endings == [FinishReason.CANCELLED, FinishReason.CANCELLED, FinishReason.STOP, FinishReason.STOP]
    assert engine.callers == ()
    assert echo.pool.num_free == echo.pool.num_blocks


async def test_cancel_all_hands_every_request_back(engine: AsyncEngine, echo: EchoEngine) -> None:
    echo.gate.clear()
    tasks = [asyncio.create_task(_collect(engine, _request(name))) for name in "ab"]
    await asyncio.sleep(0)
    assert engine.cancel_all() == 2
    echo.gate.set()
    assert [(await task)[-1].finish_reason for task in tasks] == [FinishReason.CANCELLED] * 2


async def test_commands_do_not_wait_for_a_step_that_waits_for_transfers() -> None:
    lending = LendingEngine(num_leases=1)
    engine = AsyncEngine(lambda: lending)
    await engine.start()
    await asyncio.to_thread(lending.waits.wait, 5)
    async with asyncio.timeout(30):
        assert _tokens(await _collect(engine, _request())) == [1, 2, 3, 0]
        await engine.shutdown()


async def test_wait_for_leases_ends_with_the_last_of_them_or_in_time() -> None:
    lending = LendingEngine(num_leases=2)
    engine = AsyncEngine(lambda: lending)
    await engine.start()
    assert await engine.wait_leases_ended(0.01) == 2
    waiting = asyncio.create_task(engine.wait_leases_ended(5))
    await asyncio.sleep(0)
    assert not waiting.done()
    lending.num_taken = 2
    lending.wake()
    assert await waiting == 0
    await engine.shutdown()


async def test_cancel_all_leaves_alone_what_has_ended_and_is_not_read_yet(engine: AsyncEngine, echo: EchoEngine) -> None:
    stream = engine.generate(_request())
    items = [await anext(stream)]
    async with asyncio.timeout(30):
        while engine.stats().num_finished == 0:
            await asyncio.sleep(0.005)
    await engine.kv_changes(0)  # what the thread has said before is here with its answer
    assert engine.cancel_all() == 0
    items += [item async for item in stream]
    assert items[-1].finish_reason is FinishReason.STOP
