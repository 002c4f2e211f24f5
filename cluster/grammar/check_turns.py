"""Whose grammar is checked next. Without a clock, so that every order can be tried."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Turn:
    """One check, from its arrival to its end."""

    tenant: str
    is_slow: bool = False


class CheckTurns:
    """Owns the order of waiting checks, and which run. Always: a tenant has at most one slow check, and leaves a place to others."""

    def __init__(self, num_places: int, max_waiting: int) -> None:
        """`num_places` is the number of processes, at least 2."""
        if num_places < 2:
            raise ValueError(f"num_places must be at least 2, got {num_places}: one for a slow check, one for all others")
        self._num_places = num_places
        self._max_waiting = max_waiting
        self._waiting: deque[Turn] = deque()
        self._running: set[Turn] = set()
        self._per_tenant: Counter[str] = Counter()  # running checks

    def try_add(self, turn: Turn) -> bool:
        """False if too many wait."""
        if len(self._waiting) >= self._max_waiting:
            return False
        self._waiting.append(turn)
        return True

    def begin(self) -> list[Turn]:
        """Those whose turn it is now, in the order of arrival; a tenant that has its share is passed over."""
        begun: list[Turn] = []
        for turn in list(self._waiting):
            if len(self._running) == self._num_places:
                break
            if self._per_tenant[turn.tenant] < self._num_places - 1:
                self._waiting.remove(turn)
                self._running.add(turn)
                self._per_tenant[turn.tenant] += 1
                begun.append(turn)
        return begun

    def try_go_on(self, turn: Turn) -> bool:
        """Asked for a check that takes long: it goes on as its tenant's slow one, unless there is one, or only one place is left."""
        slow = [other for other in self._running if other.is_slow]
        if len(slow) >= self._num_places - 1 or any(other.tenant == turn.tenant for other in slow):
            return False
        turn.is_slow = True
        return True

    def end(self, turn: Turn) -> None:
        """Whether it ran or still waited."""
        if turn in self._running:
            self._running.remove(turn)
            self._per_tenant[turn.tenant] -= 1
            if not self._per_tenant[turn.tenant]:
                del self._per_tenant[turn.tenant]
        elif turn in self._waiting:
            self._waiting.remove(turn)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)
