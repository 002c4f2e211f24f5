"""Which callers (gateways) are alive: each renews a lease, and what a dead one asked for is given up."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class CallerLeases:
    """Owns when each caller was last heard.

    A caller that was never heard is given a whole lease from the start of this object on: after a restart of the router
    nobody may be taken for dead who merely had no time to say a word.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._started_s = clock()
        self._heard_s: dict[str, float] = {}  # caller -> last renewal

    def renew(self, caller: str) -> None:
        self._heard_s[caller] = self._clock()

    def take_expired(self) -> list[str]:
        """Callers whose lease ran out since the last call; each once, unless it renews again."""
        now_s = self._clock()
        expired = [caller for caller, heard_s in self._heard_s.items() if now_s - heard_s > self._lease_s]
        for caller in expired:
            del self._heard_s[caller]
        return expired

    def dead_among(self, callers: Iterable[str]) -> tuple[str, ...]:
        """Those without a lease."""
        now_s = self._clock()
        return tuple(caller for caller in callers if now_s - self._heard_s.get(caller, self._started_s) > self._lease_s)

    def describe(self) -> dict[str, float]:
        """Seconds since each caller was last heard."""
        now_s = self._clock()
        return {caller: round(now_s - heard_s, 3) for caller, heard_s in self._heard_s.items()}
