"""Pushes a replica's reports to the router. Free of Ray and torch: the push is injected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from replicas.async_engine import AsyncEngine
from replicas.stats import ReplicaReport, ReplicaStats, ReportReply

logger = logging.getLogger(__name__)

Push = Callable[[ReplicaReport], Awaitable[ReportReply]]

MAX_REPORTS_PER_S = 300.0
"""All replicas together; keeps the router's core free for decisions."""
MIN_INTERVAL_S = 0.05
IDLE_INTERVAL_S = 1.0
"""Between reports of a replica in which nothing happens."""


def report_interval_s(num_replicas: int) -> float:
    """Seconds between two reports of one replica, so that all together stay under MAX_REPORTS_PER_S."""
    return max(MIN_INTERVAL_S, num_replicas / MAX_REPORTS_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaIdentity:
    """What stays the same in every report of one replica."""

    replica_id: str
    model: str
    block_size: int
    max_num_seqs: int


class Reporter:
    """Owns the number of the next KV event to send. An event is sent again until a report with it was answered."""

    def __init__(self, identity: ReplicaIdentity, engine: AsyncEngine, push: Push, *, interval_s: float, timeout_s: float = 5.0) -> None:
        self._identity = identity
        self._engine = engine
        self._push = push
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._next_event: int | None = None  # None: the router needs the full state
        self._is_failing = False
        self._last_stats: ReplicaStats | None = None

    async def run(self) -> None:
        """Reports until cancelled, at most one report under way; an unreachable router is tried again at the next interval."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        idle_until_s = next_s
        while True:
            stats = self._engine.stats()
            if stats != self._last_stats or self._next_event is None or loop.time() >= idle_until_s:
                self._last_stats = stats
                await self.report_once()
                idle_until_s = loop.time() + IDLE_INTERVAL_S
            next_s = max(next_s + self._interval_s, loop.time())
            await asyncio.sleep(next_s - loop.time())

    async def report_once(self) -> bool:
        """Sends one report; False when the router did not take it."""
        changes = await self._engine.kv_changes(self._next_event)
        report = ReplicaReport(
            replica_id=self._identity.replica_id,
            model=self._identity.model,
            epoch=self._engine.epoch,
            stats=self._engine.stats(),
            block_size=self._identity.block_size,
            max_num_seqs=self._identity.max_num_seqs,
            first_event=changes.first_event,
            events=changes.events,
            is_full_state=changes.is_full_state,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._push(report)
        except Exception as error:  # noqa: BLE001 - the push is injected: whatever its transport raises means "not delivered"
            self._note_failure(error)
            return False
        self._is_failing = False
        # A full state counts as the one position it was read at, however many blocks it lists.
        follows = changes.first_event if changes.is_full_state else changes.first_event + len(changes.events)
        self._next_event = None if reply.resync else follows
        return True

    def _note_failure(self, error: Exception) -> None:
        """Logs the first of a row of failures; a restarted router gets the full state anyway when it asks for it."""
        if not self._is_failing:
            logger.warning("replica %s cannot report: %r", self._identity.replica_id, error)
        self._is_failing = True
