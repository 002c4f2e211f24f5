"""Pushes a replica's reports to the router. Free of Ray and torch: the push is injected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from replicas.engine.async_engine import AsyncEngine
from replicas.engine_config import Role
from replicas.stats import ReplicaReport, ReplicaStats, ReportReply
from replicas.step_engine import KVChanges

logger = logging.getLogger(__name__)

Push = Callable[[ReplicaReport], Awaitable[ReportReply]]

MAX_REPORTS_PER_S = 300.0
"""Limit for all replicas together, so that the router's core stays free for decisions."""
MIN_INTERVAL_S = 0.05
IDLE_INTERVAL_S = 0.5
"""Heartbeat interval of a replica that is idle or in a long step."""


def report_interval_s(num_replicas: int) -> float:
    """Seconds between two reports of one replica, so that all replicas together stay under MAX_REPORTS_PER_S."""
    return max(MIN_INTERVAL_S, num_replicas / MAX_REPORTS_PER_S)


def longest_silence_s(num_replicas: int) -> float:
    """Longest time in seconds between two reports of a healthy replica."""
    return max(IDLE_INTERVAL_S, report_interval_s(num_replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaIdentity:
    """The constant part of one replica's reports."""

    replica_id: str
    model: str
    block_size: int
    max_num_seqs: int
    role: Role = "unified"


class Reporter:
    """Owns the number of the next KV event to send. An event is sent again until a report with it was answered.

    Events are read in the engine's thread between two steps. While a step takes longer than `idle_interval_s`, reports go out
    without events, so that the router can tell a long step from a hung replica.
    """

    def __init__(
        self,
        identity: ReplicaIdentity,
        engine: AsyncEngine,
        push: Push,
        *,
        interval_s: float,
        timeout_s: float = 5.0,
        idle_interval_s: float = IDLE_INTERVAL_S,
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._push = push
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._idle_interval_s = idle_interval_s
        self._is_draining = is_draining
        self._next_event = 0
        self._needs_full_state = True
        self._read: asyncio.Task[KVChanges] | None = None  # a read that the engine's thread has not answered yet
        self._is_failing = False
        self._last: tuple[ReplicaStats, bool] | None = None  # statistics and draining flag of the last report

    async def run(self) -> None:
        """Reports until cancelled, one report at a time; an unreachable router is tried again at the next interval."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        idle_until_s = next_s
        try:
            while True:
                now = (self._engine.stats(), self._is_draining())
                if now != self._last or self._needs_full_state or loop.time() >= idle_until_s:
                    self._last = now
                    await self.report_once()
                    idle_until_s = loop.time() + self._idle_interval_s
                next_s = max(next_s + self._interval_s, loop.time())
                await asyncio.sleep(next_s - loop.time())
        finally:
            if self._read is not None:
                self._read.cancel()

    async def report_once(self) -> bool:
        """Sends one report; False if the router did not accept it."""
        changes = await self._read_changes()
        report = ReplicaReport(
            replica_id=self._identity.replica_id,
            model=self._identity.model,
            epoch=self._engine.epoch,
            stats=self._engine.stats(),
            block_size=self._identity.block_size,
            max_num_seqs=self._identity.max_num_seqs,
            role=self._identity.role,
            first_event=changes.first_event,
            events=changes.events,
            is_full_state=changes.is_full_state,
            is_draining=self._is_draining(),
            callers=self._engine.callers,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._push(report)
        except Exception as error:  # noqa: BLE001 - the push is injected: any error of its transport means "not delivered"
            self._note_failure(error)
            return False
        self._is_failing = False
        # A full state stands for one event number, however many blocks it lists.
        self._next_event = changes.first_event if changes.is_full_state else changes.first_event + len(changes.events)
        self._needs_full_state = reply.resync
        if reply.dead_callers and (num := self._engine.cancel_callers(reply.dead_callers)):
            logger.warning("%d requests cancelled: their gateways are gone (%s)", num, ", ".join(reply.dead_callers))
        return True

    async def _read_changes(self) -> KVChanges:
        """Events since the last report; none if the engine is in a long step."""
        if self._read is None:
            since = None if self._needs_full_state else self._next_event
            self._read = asyncio.create_task(self._engine.kv_changes(since), name="kv-changes")
        await asyncio.wait({self._read}, timeout=self._idle_interval_s)
        if not self._read.done():
            return KVChanges(first_event=self._next_event, events=(), is_full_state=False)
        read, self._read = self._read, None
        return read.result()

    def _note_failure(self, error: Exception) -> None:
        """Logs the first failure in a row. A restarted router asks for the full state, so nothing else is needed."""
        if not self._is_failing:
            logger.warning("replica %s cannot report: %r", self._identity.replica_id, error)
        self._is_failing = True
