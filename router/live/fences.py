"""Which replicas are fenced: taken for hung, so that nobody waits for them any longer. Callers watch for changes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceNews:
    """All replicas fenced now; `version` names this state, in this life of the router."""

    version: int
    fenced: frozenset[str]


class Fences:
    """Owns the set of fenced replicas and wakes whoever waits for it to change."""

    def __init__(self, first_version: int | None = None) -> None:
        """Versions start from the time, so that those of an earlier life are never taken for current ones."""
        self._version = time.time_ns() if first_version is None else first_version
        self._fenced: frozenset[str] = frozenset()
        self._changed = asyncio.Event()

    @property
    def news(self) -> FenceNews:
        return FenceNews(version=self._version, fenced=self._fenced)

    def set(self, fenced: frozenset[str]) -> None:
        if fenced != self._fenced:
            self._fenced = fenced
            self._version += 1
            self._changed.set()
            self._changed = asyncio.Event()

    async def wait_changed(self, seen_version: int, timeout_s: float) -> FenceNews:
        """The state as soon as it differs from the one the caller saw; as it is after `timeout_s`."""
        if seen_version == self._version:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                return self.news
        return self.news
