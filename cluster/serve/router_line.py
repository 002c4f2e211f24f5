"""The gateway's line to the router: what comes while a call is on its way goes together with the next one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from contextvars import Context
from dataclasses import replace

from cluster.failures import RouterGone
from router.live.batch import Answers, Batch, Notice
from router.snapshot import Decision, Rejection, RoutingRequest

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between two tries to tell what the router did not hear, while no request goes there."""


class RouterLine:
    """Owns the callers that wait for a decision, and what has not been sent yet.

    One `deliver` at a time is on its way, so that the router hears of everything in order; it answers at once. While some
    request waits in the router's queue, a `wait_answers` is on its way too. A failure ends the wait of all
    that was sent: the callers ask anew.
    """

    def __init__(
        self, caller: str, deliver: Callable[[Batch], Awaitable[Answers]], wait_answers: Callable[[str], Awaitable[Answers]]
    ) -> None:
        """Both raise RouterGone when there is no answer."""
        self._caller = caller
        self._deliver = deliver
        self._wait_answers = wait_answers
        self._waiting: dict[str, asyncio.Future[Decision | Rejection]] = {}  # request id -> its caller
        self._requests: dict[str, RoutingRequest] = {}  # request id -> what has not been sent
        self._queued: set[str] = set()  # request ids that wait in the router's queue, by its last answers
        self._notices: list[Notice] = []
        self._has_request = asyncio.Event()
        self._has_settled = asyncio.Event()  # no batch is on its way
        self._has_settled.set()
        self._life: str | None = None  # of the router that answered last
        self._sender: asyncio.Task[None] | None = None
        self._poller: asyncio.Task[None] | None = None

    async def acquire(self, request: RoutingRequest) -> Decision | Rejection:
        """Waits in the router's queue. Cancelling the call only stops the waiting: the notice that follows every request takes it
        out of the queue. Raises RouterGone."""
        request_id = request.request_id
        future: asyncio.Future[Decision | Rejection] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        self._queued.discard(request_id)
        self._requests[request_id] = replace(request, caller=self._caller)
        self._has_request.set()
        self._send_soon()
        try:
            return await future
        finally:
            if self._waiting.get(request_id) is future:
                del self._waiting[request_id]
                self._queued.discard(request_id)
                self._requests.pop(request_id, None)

    def tell(self, notice: Notice) -> None:
        """Does not block. A notice that did not arrive is told again, before any request that is sent after it."""
        self._notices.append(notice)
        self._send_soon()

    async def close(self) -> None:
        """Callers that still wait are told that the router is gone."""
        tasks = [task for task in (self._sender, self._poller) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._lose(list(self._waiting), RouterGone("this gateway is closing"))

    @property
    def _sent(self) -> list[str]:
        return [request_id for request_id in self._waiting if request_id not in self._requests]

    def _send_soon(self) -> None:
        """From a context of its own: Serve cancels the calls made in the context of a request together with it."""
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send(), context=Context())

    async def _send(self) -> None:
        while self._requests or self._notices:
            batch = Batch(caller=self._caller, notices=tuple(self._notices), requests=tuple(self._requests.values()))
            self._notices.clear()
            self._requests.clear()
            self._has_settled.clear()
            try:
                answers = await self._deliver(batch)
            except Exception as error:  # noqa: BLE001 - whoever waits gets it
                self._notices[:0] = batch.notices
                self._lose(self._sent, error)
                if batch.notices:
                    logger.warning("the router did not hear of %s, and is told again: %s", ", ".join(map(str, batch.notices)), error)
                    self._has_settled.set()
                    await self._pause()
            else:
                if answers.life != self._life:
                    self._lose(list(self._queued), RouterGone("it has restarted"))
                    self._life = answers.life
                sent = {request.request_id for request in batch.requests}
                self._queued |= (sent & self._waiting.keys()) - self._requests.keys()
                self._settle(answers)
                if self._queued and (self._poller is None or self._poller.done()):
                    self._poller = asyncio.create_task(self._poll(), context=Context())
            self._has_settled.set()

    async def _pause(self) -> None:
        """A request ends it: it goes at once."""
        if not self._requests:
            self._has_request.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self._has_request.wait()

    async def _poll(self) -> None:
        while self._queued:
            asked = frozenset(self._queued)
            try:
                answers = await self._wait_answers(self._caller)
            except Exception as error:  # noqa: BLE001 - whoever waits gets it
                self._lose(self._sent, error)
                return
            self._settle(answers)
            if not answers.is_known:
                await self._has_settled.wait()  # the batch on its way may bring what this call did not find any more
                self._lose(asked & self._queued, RouterGone("it has forgotten the request"))

    def _settle(self, answers: Answers) -> None:
        for request_id, decision in answers.answers:
            if request_id in self._requests:  # it is asked anew
                continue
            if decision is None:
                self._lose([request_id], RouterGone("it has given the request up"))
                continue
            self._queued.discard(request_id)
            if (future := self._waiting.pop(request_id, None)) is not None and not future.done():
                future.set_result(decision)

    def _lose(self, request_ids: Iterable[str], error: Exception) -> None:
        for request_id in request_ids:
            self._queued.discard(request_id)
            future = self._waiting.pop(request_id, None)
            if future is not None and not future.done():
                future.set_exception(error)
