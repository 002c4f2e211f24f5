"""How fast KV of other replicas comes in. Free of torch."""

from __future__ import annotations

from replicas.engine.step_statistics import SMOOTHING


class TransferRate:
    """Owns tokens and seconds of a handoff, both as exponentially weighted means: their quotient is not ruled by small ones."""

    def __init__(self) -> None:
        self._tokens: float | None = None
        self._seconds = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Of one handoff. One of which everything was cached already tells nothing."""
        if num_tokens <= 0 or seconds <= 0:
            return
        if self._tokens is None:
            self._tokens, self._seconds = num_tokens, seconds
        else:
            self._tokens += SMOOTHING * (num_tokens - self._tokens)
            self._seconds += SMOOTHING * (seconds - self._seconds)

    @property
    def tokens_per_s(self) -> float | None:
        return None if self._tokens is None else self._tokens / self._seconds
