"""How fast KV of other replicas comes in. Free of torch."""

from __future__ import annotations

from replicas.stats import smoothed


class TransferRate:
    """Owns tokens and seconds of a handoff, both as exponentially weighted means: their quotient is not ruled by small ones."""

    def __init__(self) -> None:
        self._tokens: float | None = None
        self._seconds: float | None = None

    def add(self, num_tokens: int, seconds: float) -> None:
        """Of one handoff. One of which everything was cached already tells nothing."""
        if num_tokens <= 0 or seconds <= 0:
            return
        self._tokens, self._seconds = smoothed(self._tokens, num_tokens), smoothed(self._seconds, seconds)

    @property
    def tokens_per_s(self) -> float | None:
        return None if self._tokens is None or self._seconds is None else self._tokens / self._seconds
