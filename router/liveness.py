"""Finds out which silent replicas are dead. Silence alone proves nothing: a router must go on when only reports fail."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

FindLiving = Callable[[], Awaitable[frozenset[str]]]
"""Ids of every replica whose process exists."""


class LivenessMonitor:
    """Owns the time at which each replica was last heard. Asks for the living only while somebody is silent."""

    def __init__(
        self,
        find_living: FindLiving,
        remove: Callable[[str], None],
        *,
        silence_s: float = 3.0,
        interval_s: float = 1.0,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`remove` is called once for each replica that turns out to be dead."""
        self._find_living = find_living
        self._remove = remove
        self._silence_s = silence_s
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._heard_s: dict[str, float] = {}  # replica id -> last report

    def hear(self, replica_id: str) -> None:
        self._heard_s[replica_id] = self._clock()

    def forget(self, replica_id: str) -> None:
        """It was removed for another reason."""
        self._heard_s.pop(replica_id, None)

    async def run(self) -> None:
        """Checks until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.check()

    async def check(self) -> None:
        """Removes every replica that is silent and dead. Nobody is, for now, when the living cannot be asked for."""
        now_s = self._clock()
        silent = [replica_id for replica_id, heard_s in self._heard_s.items() if now_s - heard_s > self._silence_s]
        if not silent:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                living = await self._find_living()
        except Exception as error:  # noqa: BLE001 - injected: whatever it raises means "not known now", and routing goes on
            logger.warning("cannot tell which of %d silent replicas live: %r", len(silent), error)
            return
        for replica_id in silent:
            if replica_id not in living:
                logger.warning("replica %s is dead", replica_id)
                self.forget(replica_id)
                self._remove(replica_id)
