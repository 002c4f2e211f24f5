"""The measured rate of KV received from other replicas. Free of torch."""

from __future__ import annotations

from replicas.stats import smoothed


class TransferRate:
    """Owns the exponentially weighted means of a handoff's tokens and seconds. Small handoffs do not dominate their quotient."""

    def __init__(self) -> None:
        self._tokens: float | None = None
        self._seconds: float | None = None

    def add(self, num_tokens: int, seconds: float) -> None:
        """Adds one handoff. A handoff whose tokens were all cached is ignored."""
        if num_tokens <= 0 or seconds <= 0:
            return
        self._tokens, self._seconds = smoothed(self._tokens, num_tokens), smoothed(self._seconds, seconds)

    @property
    def tokens_per_s(self) -> float | None:
        return None if self._tokens is None or self._seconds is None else self._tokens / self._seconds
