"""The engine on its own thread, driven from an asyncio loop. Free of torch: the engine is loaded inside the thread.

The loop sends commands through one queue and gets progress back through `call_soon_threadsafe`, one call a step; no
other state is shared. A step never waits for a reader; all progress that is ready when a reader wakes up is one item.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import suppress
from typing import Any

from replicas.request import FinishReason, GenerationRequest, RequestKey, RequestProgress, RequestRejected, StepOutput, merge_progress
from replicas.stats import ReplicaStats
from replicas.step_engine import EngineUnhealthy, KVChanges, StepEngine

logger = logging.getLogger(__name__)


class _Stream:
    """Progress of one request on its way to its reader. Lives in the event loop."""

    def __init__(self, request: GenerationRequest) -> None:
        self.key = request.key
        self.attempt = request.attempt
        self.caller = request.caller
        self.is_finished = False
        self._pending: RequestProgress | Exception | None = None
        self._ready = asyncio.Event()

    def push(self, progress: RequestProgress) -> None:
        if self.is_finished:
            return
        held = self._pending
        self._pending = merge_progress(held, progress) if isinstance(held, RequestProgress) else progress
        self.is_finished = progress.finish_reason is not None
        self._ready.set()

    def fail(self, error: Exception) -> None:
        if not self.is_finished:
            self._pending, self.is_finished = error, True
            self._ready.set()

    async def take(self) -> RequestProgress:
        await self._ready.wait()
        self._ready.clear()
        pending, self._pending = self._pending, None
        if isinstance(pending, RequestProgress):
            return pending
        assert pending is not None
        raise pending


class AsyncEngine:
    """Owns the engine thread. Every accepted request ends in exactly one progress with a `finish_reason`."""

    def __init__(
        self,
        load: Callable[[], StepEngine],
        *,
        progress_deadline_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        on_step: Callable[[StepOutput], None] | None = None,
    ) -> None:
        """`load` runs in the engine thread. `on_step` is called in the event loop after each step, for metrics."""
        self._load = load
        self._progress_deadline_s = progress_deadline_s
        self._clock = clock
        self._on_step = on_step
        self._commands: queue.SimpleQueue[Callable[[StepEngine], None] | None] = queue.SimpleQueue()
        self._streams: dict[RequestKey, _Stream] = {}
        self._reads: set[asyncio.Future[KVChanges]] = set()  # calls of kv_changes without an answer yet
        self._engine: StepEngine | None = None  # set once loaded; other threads may only wake it
        self._stats = ReplicaStats()
        self._has_stepped = asyncio.Event()
        self._busy_since_s: float | None = None  # set while there is work; moved forward by each finished step
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.epoch = time.time_ns()

    async def start(self) -> None:
        """Loads the engine and returns when it can serve; raises the load's error."""
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="engine", daemon=True)
        self._thread.start()
        await ready

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestProgress, None]:
        """Yields progress until the request ends; closing the iterator or cancelling its task cancels the request.

        A newer attempt with the same key replaces the older one, whose stream ends as cancelled. Raises RequestRejected if
        the engine can never serve the request or the key is in use, EngineUnhealthy if the engine is dead.
        """
        self._raise_if_dead()
        older = self._streams.get(request.key)
        if older is not None and older.attempt >= request.attempt:
            raise RequestRejected(f"request {request.request_id!r} choice {request.choice} is already running")
        if older is not None:
            self._cancel(older)
            older.push(RequestProgress(key=older.key, attempt=older.attempt, finish_reason=FinishReason.CANCELLED))
        stream = self._streams[request.key] = _Stream(request)
        self._submit(lambda engine: self._add(engine, request, stream))
        try:
            while True:
                progress = await stream.take()
                yield progress
                if progress.finish_reason is not None:
                    return
        finally:
            if not stream.is_finished:
                self._cancel(stream)
            if self._streams.get(request.key) is stream:
                del self._streams[request.key]

    def cancel(self, request_id: str) -> int:
        """Cancels every choice of a request; each stream ends with CANCELLED. Returns the number of streams."""
        streams = [stream for key, stream in self._streams.items() if key.request_id == request_id]
        for stream in streams:
            self._cancel(stream)
        return len(streams)

    @property
    def callers(self) -> tuple[str, ...]:
        """Callers of the current requests, sorted, each once, without the empty name."""
        return tuple(sorted({stream.caller for stream in self._streams.values() if stream.caller}))

    def cancel_callers(self, callers: Collection[str]) -> int:
        """Cancels every request of these callers; returns the number of requests."""
        streams = [stream for stream in self._streams.values() if stream.caller in callers]
        for stream in streams:
            self._cancel(stream)
        return len(streams)

    def cancel_all(self) -> int:
        """Cancels every request, so that its reader can continue it elsewhere; returns the number of requests. KV of requests that
        ended with HANDOFF stays readable."""
        streams = [stream for stream in self._streams.values() if not stream.is_finished]
        for stream in streams:
            self._cancel(stream)
        return len(streams)

    def stats(self) -> ReplicaStats:
        """Statistics as of the end of the last step."""
        return self._stats

    async def kv_changes(self, since: int | None) -> KVChanges:
        """Changes since event `since`, read between two steps; None asks for the full state.

        Raises EngineUnhealthy if the engine is dead, or ends before it answers.
        """
        self._raise_if_dead()
        assert self._loop is not None
        loop = self._loop
        future: asyncio.Future[KVChanges] = loop.create_future()
        self._reads.add(future)
        future.add_done_callback(self._reads.discard)

        def read(engine: StepEngine) -> None:
            loop.call_soon_threadsafe(_resolve, future, engine.kv_changes(since))

        self._submit(read)
        return await future

    async def wait_leases_ended(self, timeout_s: float) -> int:
        """Waits until no other replica holds a lease on blocks here, at most `timeout_s`; returns the number of open leases."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._stats.handoffs.num_leases and self._error is None:
                    self._has_stepped.clear()
                    await self._has_stepped.wait()
        return self._stats.handoffs.num_leases

    def check_health(self) -> None:
        """Raises EngineUnhealthy if the thread died or makes no progress."""
        self._raise_if_dead()
        busy_since_s = self._busy_since_s
        if busy_since_s is not None and (stuck_s := self._clock() - busy_since_s) > self._progress_deadline_s:
            raise EngineUnhealthy(f"no step finished for {stuck_s:.0f} s although there is work")

    async def shutdown(self) -> None:
        """Ends the thread after its current step; running requests end as cancelled."""
        if self._thread is None:
            return
        self._put(None)
        await asyncio.to_thread(self._thread.join)
        for stream in self._streams.values():
            stream.push(RequestProgress(key=stream.key, attempt=stream.attempt, finish_reason=FinishReason.CANCELLED))
        for future in self._reads:
            _reject(future, EngineUnhealthy("the engine was shut down"))

    def _raise_if_dead(self) -> None:
        if self._error is not None:
            raise EngineUnhealthy(f"the engine stopped: {self._error!r}")
        if self._thread is not None and not self._thread.is_alive():
            raise EngineUnhealthy("the engine thread has ended")

    def _submit(self, command: Callable[[StepEngine], None]) -> None:
        if self._busy_since_s is None:
            self._busy_since_s = self._clock()
        self._put(command)

    def _put(self, command: Callable[[StepEngine], None] | None) -> None:
        self._commands.put(command)
        if self._engine is not None:
            self._engine.wake()

    def _cancel(self, stream: _Stream) -> None:
        self._submit(lambda engine: _ignore_result(engine.cancel(stream.key)))

    # In the event loop, called from the engine thread.

    def _dispatch(self, output: StepOutput) -> None:
        for progress in output.progress:
            stream = self._streams.get(progress.key)
            if stream is not None and stream.attempt == progress.attempt:
                stream.push(progress)
        if self._on_step is not None:
            self._on_step(output)
        self._has_stepped.set()

    def _fail_all(self, error: BaseException) -> None:
        self._has_stepped.set()
        for stream in self._streams.values():
            stream.fail(EngineUnhealthy(f"the engine stopped: {error!r}"))
        for future in self._reads:
            _reject(future, EngineUnhealthy(f"the engine stopped: {error!r}"))

    # In the engine thread.

    def _run(self, ready: asyncio.Future[None]) -> None:
        assert self._loop is not None
        try:
            engine = self._load()
        except Exception as error:  # noqa: BLE001  raised by start()
            self._error = error
            self._loop.call_soon_threadsafe(_reject, ready, error)
            return
        self._engine = engine
        self._stats = engine.stats()
        self._loop.call_soon_threadsafe(_resolve, ready, None)
        try:
            self._serve(engine)
        except Exception as error:
            logger.exception("the engine thread failed")
            self._error = error
            self._loop.call_soon_threadsafe(self._fail_all, error)
        finally:
            engine.close()

    def _serve(self, engine: StepEngine) -> None:
        assert self._loop is not None
        while True:
            if not engine.has_work and self._commands.empty():
                self._busy_since_s = None
                command = self._commands.get()
                self._busy_since_s = self._clock()
            else:
                command = _next_or(self._commands, _NOTHING)
            while command is not _NOTHING:
                if command is None:
                    return
                command(engine)
                command = _next_or(self._commands, _NOTHING)
            if engine.has_work:
                output = engine.step()
                self._stats = engine.stats()
                self._busy_since_s = self._clock()
                self._loop.call_soon_threadsafe(self._dispatch, output)
            else:
                self._stats = engine.stats()

    def _add(self, engine: StepEngine, request: GenerationRequest, stream: _Stream) -> None:
        assert self._loop is not None
        try:
            engine.add_request(request)
        except RequestRejected as error:
            self._loop.call_soon_threadsafe(stream.fail, error)


def _nothing(engine: StepEngine) -> None:
    """Stands for an empty queue."""


_NOTHING = _nothing


def _next_or(
    commands: queue.SimpleQueue[Callable[[StepEngine], None] | None], default: Callable[[StepEngine], None]
) -> Callable[[StepEngine], None] | None:
    try:
        return commands.get_nowait()
    except queue.Empty:
        return default


def _ignore_result(result: bool) -> None:
    """A cancel that finds no request is not an error: the request ended first."""


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _reject(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
