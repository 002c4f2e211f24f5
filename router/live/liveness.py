"""Finds out which silent replicas are dead, and which hang. Silence alone proves no death: a router must go on when only
reports fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

FindLiving = Callable[[], Awaitable[frozenset[str]]]
"""Ids of every replica whose process exists."""


@dataclass(slots=True)
class _Heard:
    model: str
    at_s: float


class LivenessMonitor:
    """Owns the time at which each replica was last heard. Asks for the living only while somebody is silent.

    A silent replica is fenced, whether it lives or not, while another one of its model is heard: its work can go on
    elsewhere, and if it only slept it comes back with its next report. When all are silent, the fault is more likely here
    or in the network, and there would be no place to go to: then nobody is fenced.
    """

    def __init__(
        self,
        find_living: FindLiving,
        remove: Callable[[str], None],
        fence: Callable[[frozenset[str]], None],
        clock: Callable[[], float],
        *,
        hang_s: Callable[[], float],
        silence_s: float = 3.0,
        timeout_s: float = 10.0,
    ) -> None:
        """`remove` is called once for each replica that turns out to be dead, `fence` with all that are fenced whenever they
        change. `hang_s` is the silence after which a replica is fenced, `silence_s` that after which it may be dead.
        `clock` should not count time in which this process did not run."""
        self._find_living = find_living
        self._remove = remove
        self._fence = fence
        self._hang_s = hang_s
        self._silence_s = silence_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._heard: dict[str, _Heard] = {}  # replica id -> last report
        self._fenced: frozenset[str] = frozenset()

    @property
    def num_known(self) -> int:
        return len(self._heard)

    def hear(self, replica_id: str, model: str) -> None:
        self._heard[replica_id] = _Heard(model, self._clock())
        if replica_id in self._fenced:
            logger.warning("replica %s is heard again", replica_id)
            self._set_fenced(self._fenced - {replica_id})

    def forget(self, replica_id: str) -> None:
        """It was removed for another reason."""
        self._heard.pop(replica_id, None)
        self._set_fenced(self._fenced - {replica_id})

    def check_silence(self) -> None:
        """Fences whoever has been silent for too long."""
        self._set_fenced(self._silent_with_peers(self._clock()))

    async def check_deaths(self) -> None:
        """Removes every replica that is silent and dead. Nobody is, for now, when the living cannot be asked for."""
        now_s = self._clock()
        silent = [replica_id for replica_id, heard in self._heard.items() if now_s - heard.at_s > self._silence_s]
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

    def _silent_with_peers(self, now_s: float) -> frozenset[str]:
        hang_s = self._hang_s()
        silent = {replica_id for replica_id, heard in self._heard.items() if now_s - heard.at_s > hang_s}
        heard_models = {heard.model for replica_id, heard in self._heard.items() if replica_id not in silent}
        return frozenset(replica_id for replica_id in silent if self._heard[replica_id].model in heard_models)

    def _set_fenced(self, fenced: frozenset[str]) -> None:
        if fenced == self._fenced:
            return
        for replica_id in fenced - self._fenced:
            logger.warning("replica %s is fenced: no report for %.1f s", replica_id, self._clock() - self._heard[replica_id].at_s)
        self._fenced = fenced
        self._fence(fenced)
