"""A distribution of lengths, defined by a few quantiles."""

from __future__ import annotations

from bisect import bisect_right
from math import exp, log


class LengthCurve:
    """The distribution of a positive quantity by its quantiles. Between two quantiles its logarithm is uniform."""

    def __init__(self, *quantiles: tuple[float, float]) -> None:
        """`quantiles` are (share, value), both ascending; the first share is 0 (the minimum) and the last 1 (the maximum).

        Raises ValueError otherwise.
        """
        self._shares = [share for share, _ in quantiles]
        self._values = [value for _, value in quantiles]
        is_ascending = self._shares == sorted(set(self._shares)) and self._values == sorted(self._values)
        if len(quantiles) < 2 or not is_ascending or (self._shares[0], self._shares[-1]) != (0, 1) or self._values[0] <= 0:
            raise ValueError(f"quantiles must ascend from share 0 to share 1 with values above 0, got {quantiles}")

    def value(self, share: float) -> float:
        """The value that a share (0 to 1) of the distribution lies below."""
        above = min(bisect_right(self._shares, share), len(self._shares) - 1)
        low, high = self._values[above - 1], self._values[above]
        within = (share - self._shares[above - 1]) / (self._shares[above] - self._shares[above - 1])
        return low * exp(within * log(high / low))

    def mean(self) -> float:
        """The exact mean: the integral of `value` over all shares."""
        total = 0.0
        for index in range(1, len(self._shares)):
            low, high = self._values[index - 1], self._values[index]
            piece = low if low == high else (high - low) / log(high / low)
            total += (self._shares[index] - self._shares[index - 1]) * piece
        return total
