"""A clock that stands still while its owner does not run: nobody is silent to those who do not listen."""

from __future__ import annotations

import time
from collections.abc import Callable


class AttentiveClock:
    """Owns how much time was lost. A stopped or starved process finds, when it goes on, that no time has passed for others."""

    def __init__(self, *, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`tick` is to be called every `interval_s`; what a tick comes late by, beyond one more interval, is lost time."""
        self._interval_s = interval_s
        self._clock = clock
        self._ticked_s = clock()
        self._lost_s = 0.0

    def tick(self) -> None:
        """The owner runs."""
        now_s = self._clock()
        late_s = now_s - self._ticked_s - 2 * self._interval_s
        self._ticked_s = now_s
        if late_s > 0:
            self._lost_s += late_s

    def __call__(self) -> float:
        """Attentive seconds; monotonic. Between two ticks it goes on for at most two intervals."""
        return min(self._clock(), self._ticked_s + 2 * self._interval_s) - self._lost_s
