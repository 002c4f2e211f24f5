"""The router seen from an asyncio loop: callers wait for their decisions, one pump asks the router to decide."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial

from replicas.stats import ReplicaReport, ReportReply
from router.live.answer_box import AnswerBox
from router.live.batch import Answers, Notice, PrefillEnded, RequestEnded
from router.router import Router
from router.routing_statistics import RoutingStatistics
from router.snapshot import Decision, Rejection, RoutingRequest

logger = logging.getLogger(__name__)


class AsyncRouter:
    """Owns the futures of waiting callers. Each caller gets exactly one answer, or is gone and leaves no booking.

    All calls that arrive while the loop is busy are decided together, by one `Router.step`.
    """

    def __init__(self, router: Router, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives Unix time: deadlines of requests are told in it."""
        self._router = router
        self._clock = clock
        self._waiting: dict[str, asyncio.Future[Decision | Rejection]] = {}  # request id -> its caller
        self._boxes: dict[str, AnswerBox] = {}  # gateway -> answers that it has not taken
        self._life = secrets.token_hex(4)
        self._changed = asyncio.Event()
        self._stepped = asyncio.Event()  # of the next step; each has one of its own
        self._pump: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins deciding; needs a running loop."""
        self._pump = asyncio.create_task(self._run(), name="router-pump")

    async def close(self) -> None:
        """Stops deciding; callers that still wait are cancelled."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        for future in self._waiting.values():
            future.cancel()
        self._stepped.set()

    def check_health(self) -> None:
        """Raises RuntimeError when the pump has died: then nobody would ever be answered."""
        if self._pump is not None and self._pump.done():
            reason = "it was closed" if self._pump.cancelled() else repr(self._pump.exception())
            raise RuntimeError(f"the router stopped deciding: {reason}")

    async def decide(self, caller: str, requests: Sequence[RoutingRequest]) -> Answers:
        """Queues requests of one gateway, and answers once the router has looked at them: with all that the gateway is owed by
        now. Whatever of them has to wait is asked for by `wait_answers`. A waiting request ends by its release; one that is asked
        anew takes the place of the older."""
        box = self._boxes.setdefault(caller, AnswerBox())
        for request in requests:
            future = self._submit(request)
            future.add_done_callback(partial(self._forget, request.request_id))
            box.owe(request.request_id, future)
        if requests:
            await self._stepped.wait()
        return self._taken(caller, box)

    async def wait_answers(self, caller: str, timeout_s: float) -> Answers:
        """The next answers that a gateway is owed, as soon as there is one; none after `timeout_s`, or when it is owed none.

        Cancelling tells that the gateway is gone, or has given up: its requests leave the queue.
        """
        box = self._boxes.get(caller)
        if box is None:
            return Answers(life=self._life, is_known=False)
        try:
            await box.wait_some(timeout_s)
        except asyncio.CancelledError:
            for request_id in box.owed:
                self._cancel(request_id)
            raise
        return self._taken(caller, box)

    def note(self, notice: Notice) -> None:
        """What a gateway tells beside its requests."""
        if isinstance(notice, RequestEnded):
            self.release(notice.request_id, notice.num_output_tokens)
        elif isinstance(notice, PrefillEnded):
            self.release_prefill(notice.request_id)
        else:
            self.remove_replica(notice.replica_id)

    def release(self, request_id: str, num_output_tokens: int) -> None:
        """The request has ended on its replica; unknown ids are ignored."""
        if request_id in self._waiting:
            self._cancel(request_id)
        else:
            self._router.release(request_id, self._clock(), num_output_tokens)
            self._changed.set()

    def release_prefill(self, request_id: str) -> None:
        """The prefill side of a pair has ended for every choice; unknown ids, and those that wait again, are ignored."""
        if request_id not in self._waiting:
            self._router.release_prefill(request_id, self._clock())
            self._changed.set()

    def release_caller(self, caller: str) -> int:
        """The caller is dead: whatever it waits for or has booked ends, and it is owed nothing. Returns how many requests that
        were."""
        self._boxes.pop(caller, None)
        request_ids = self._router.requests_of(caller)
        for request_id in request_ids:
            self._cancel(request_id)
        return len(request_ids)

    def set_fenced(self, replica_ids: frozenset[str]) -> None:
        """These replicas, and no others, are taken for hung."""
        self._router.set_fenced(replica_ids)
        self._changed.set()

    def apply_report(self, report: ReplicaReport) -> ReportReply:
        reply = self._router.apply_report(report, self._clock())
        self._changed.set()
        return reply

    def remove_replica(self, replica_id: str) -> None:
        self._router.remove_replica(replica_id, self._clock())
        self._changed.set()

    def num_serving(self) -> dict[str, int]:
        return self._router.num_serving()

    def statistics(self) -> dict[str, RoutingStatistics]:
        return self._router.statistics()

    def describe(self) -> dict[str, object]:
        return self._router.describe(self._clock())

    def explain(self, request_id: str) -> list[Decision | Rejection]:
        return self._router.explain(request_id)

    def _submit(self, request: RoutingRequest) -> asyncio.Future[Decision | Rejection]:
        older = self._waiting.pop(request.request_id, None)
        if older is not None:
            older.cancel()
            self._router.cancel(request.request_id, self._clock())
        self._router.submit(request, self._clock())
        future: asyncio.Future[Decision | Rejection] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = future
        self._changed.set()
        return future

    def _forget(self, request_id: str, answered: asyncio.Future[Decision | Rejection]) -> None:
        if self._waiting.get(request_id) is answered:
            del self._waiting[request_id]

    def _taken(self, caller: str, box: AnswerBox) -> Answers:
        answers = box.take()
        if box.is_empty and self._boxes.get(caller) is box:
            del self._boxes[caller]
        return Answers(life=self._life, answers=answers)

    def _cancel(self, request_id: str) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting.cancel()
        self._router.cancel(request_id, self._clock())
        self._changed.set()

    async def _run(self) -> None:
        while True:
            now_s = self._clock()
            for answer in self._router.step(now_s):
                future = self._waiting.get(answer.request_id)
                if future is not None and not future.done():
                    future.set_result(answer)
                elif isinstance(answer, Decision):
                    # Its caller left in this very turn: the booking must not outlive it.
                    self._router.cancel(answer.request_id, now_s)
            self._stepped.set()
            self._stepped = asyncio.Event()
            wakeup_s = self._router.next_wakeup_s(now_s)
            self._changed.clear()
            try:
                async with asyncio.timeout(None if wakeup_s is None else max(0.0, wakeup_s - self._clock())):
                    await self._changed.wait()
            except TimeoutError:
                logger.debug("router woke up on its own")
