"""Measured chances that drafts are accepted. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

NUM_DEPTHS = 4
"""Depths told apart: the first draft, the second, the third, and all behind it."""
SHARED_MEMORY = 0.98
"""What one more observation leaves of the weight of the earlier ones, over all requests: about 50 count."""
OWN_MEMORY = 0.85
"""The same for one request: about 7 count."""
SHARED_WEIGHT = 2.0
"""Observations of a request's own that weigh as much as what all requests have shown."""

Kind = tuple[str, int]
"""A proposer's name, and its evidence for the draft."""


class _Rates:
    """Accepted and tried drafts by depth, as decaying sums. A draft is tried if all before it were accepted."""

    __slots__ = ("_memory", "accepted", "tried")

    def __init__(self, memory: float, accepted: float = 0.0, tried: float = 0.0) -> None:
        self._memory = memory
        self.accepted = [accepted] * NUM_DEPTHS
        self.tried = [tried] * NUM_DEPTHS

    def note(self, num_tried: int, num_accepted: int) -> None:
        for depth in range(num_tried):
            place = min(depth, NUM_DEPTHS - 1)
            self.accepted[place] = self.accepted[place] * self._memory + (depth < num_accepted)
            self.tried[place] = self.tried[place] * self._memory + 1


class OwnAcceptance:
    """What one request's drafts have shown."""

    __slots__ = ("rates",)

    def __init__(self) -> None:
        self.rates: dict[Kind, _Rates] = {}


class Acceptance:
    """Owns what the drafts of all requests have shown, by proposer, evidence and depth.

    A request is expected to behave like the others until its own drafts show otherwise.
    """

    def __init__(self) -> None:
        self._shared: dict[Kind, _Rates] = {}

    def survival(self, own: OwnAcceptance, kind: Kind, num_drafts: int) -> Sequence[float]:
        """Of each of `num_drafts` drafts, the chance that it and all before it are accepted."""
        shared, mine = self._shared.get(kind), own.rates.get(kind)
        chances: list[float] = []
        chance = 1.0
        for depth in range(num_drafts):
            if depth < NUM_DEPTHS:
                rate = 0.5 if shared is None else shared.accepted[depth] / shared.tried[depth]
                if mine is not None:
                    rate = (mine.accepted[depth] + SHARED_WEIGHT * rate) / (mine.tried[depth] + SHARED_WEIGHT)
            chance *= rate
            chances.append(chance)
        return chances

    def best_rate(self, name: str) -> float:
        """The highest chance of a first draft of this proposer over all evidence that it has shown; 0.5 before any."""
        return max((rates.accepted[0] / rates.tried[0] for kind, rates in self._shared.items() if kind[0] == name), default=0.5)

    def note(self, own: OwnAcceptance, kind: Kind, num_drafts: int, num_accepted: int) -> None:
        """Learns from one verification."""
        num_tried = min(num_drafts, num_accepted + 1)
        if kind not in self._shared:
            self._shared[kind] = _Rates(SHARED_MEMORY, accepted=1.0, tried=2.0)
        if kind not in own.rates:
            own.rates[kind] = _Rates(OWN_MEMORY)
        self._shared[kind].note(num_tried, num_accepted)
        own.rates[kind].note(num_tried, num_accepted)
