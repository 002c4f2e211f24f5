"""How long a step takes, by its rows. Free of torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of a step by its number of rows (tokens), each with logits, linear between the measured numbers and beyond them.

    A row also reads the KV before it, so seconds grow with the context of the rows.
    """

    num_rows: Sequence[int]
    """Measured numbers of rows, ascending."""
    row_s: Sequence[float]
    """Seconds of a step with so many rows at a short context."""
    context_s: float = 0.0
    """Further seconds for each token of context that a further row of the same request attends to."""

    def __post_init__(self) -> None:
        if not self.num_rows or len(self.num_rows) != len(self.row_s):
            raise ValueError("a step cost needs as many seconds as numbers of rows, and at least one")

    @classmethod
    def measured(cls, num_rows: Sequence[int], row_s: Sequence[float], context_s: float = 0.0) -> StepCost:
        """From timings, in which noise can make more rows look faster than fewer: the true cost never falls."""
        rising: list[float] = []
        least = float("inf")
        for seconds in reversed(row_s):
            least = min(least, seconds)
            rising.append(least)
        return cls(num_rows=tuple(num_rows), row_s=tuple(reversed(rising)), context_s=max(0.0, context_s))

    def seconds(self, num_rows: int) -> float:
        rows, seconds = self.num_rows, self.row_s
        if num_rows <= rows[0] or len(rows) == 1:
            return seconds[0]
        place = min(bisect_left(rows, num_rows), len(rows) - 1)
        slope = (seconds[place] - seconds[place - 1]) / (rows[place] - rows[place - 1])
        return seconds[place] + slope * (num_rows - rows[place])
