"""Answers that one gateway is owed by the router."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from functools import partial

from router.live.batch import Answer
from router.snapshot import Decision, Rejection


class AnswerBox:
    """Owns answers from the moment they are decided until they are taken; each is taken once."""

    def __init__(self) -> None:
        self._owed: dict[str, asyncio.Future[Decision | Rejection]] = {}  # request id -> its answer to come
        self._decided: list[Answer] = []
        self._has_some = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        """Nothing is in it, and nothing will be."""
        return not self._owed and not self._decided

    @property
    def owed(self) -> tuple[str, ...]:
        return tuple(self._owed)

    def owe(self, request_id: str, answer: asyncio.Future[Decision | Rejection]) -> None:
        """`answer` will come into the box; when it is cancelled, the request was given up. It takes the place of an older one,
        decided or not."""
        self._decided = [older for older in self._decided if older.request_id != request_id]
        self._owed[request_id] = answer
        answer.add_done_callback(partial(self._put, request_id))

    def take(self) -> tuple[Answer, ...]:
        taken = tuple(self._decided)
        self._decided.clear()
        self._has_some.clear()
        return taken

    async def wait_some(self, timeout_s: float) -> None:
        """Returns when there is an answer to take, at the latest after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_some.wait()

    def _put(self, request_id: str, answer: asyncio.Future[Decision | Rejection]) -> None:
        if self._owed.get(request_id) is not answer:
            return
        del self._owed[request_id]
        decision = None if answer.cancelled() else answer.result()
        self._decided.append(Answer(request_id, replace(decision, candidates=()) if isinstance(decision, Decision) else decision))
        self._has_some.set()
