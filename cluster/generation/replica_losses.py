"""The replicas that a choice lost, and the consequences for it."""

from __future__ import annotations

from collections.abc import Callable

from cluster.failures import ReplicaDied, ReplicaGone
from cluster.settings.failover import FailoverPolicy

_LONGEST_PAUSE_S = 1.0


class ReplicaLosses:
    """Owns the losses of one choice, and measures how long it has been without progress."""

    def __init__(self, policy: FailoverPolicy, clock: Callable[[], float]) -> None:
        self.num_deaths = 0
        self.replica_ids: frozenset[str] = frozenset()
        self._policy = policy
        self._clock = clock
        self._since_s = 0.0  # time of the first loss after the last token
        self._num_tokens = -1
        self._num_repeats = 0
        self._is_pausing = False

    @property
    def is_suspect(self) -> bool:
        """Whether the choice was present at enough deaths to be their possible cause: it must run alone on its next replica."""
        return self.num_deaths >= max(2, self._policy.max_deaths - 1)

    @property
    def is_condemned(self) -> bool:
        return self.num_deaths >= self._policy.max_deaths

    @property
    def has_waited_enough(self) -> bool:
        return self._clock() - self._since_s > self._policy.replica_timeout_s

    def take_pause(self) -> float | None:
        """Seconds from the first loss to now, the first token after it; None when no replica was lost since the last call."""
        if not self._is_pausing:
            return None
        self._is_pausing = False
        return self._clock() - self._since_s

    def add(self, error: ReplicaGone, num_tokens: int) -> float:
        """Counts a loss after `num_tokens` emitted tokens. Returns the seconds to wait before asking the router for another replica.

        The wait grows while the router names the same replicas again: it has no others, until a successor has loaded.
        """
        self.num_deaths += isinstance(error, ReplicaDied)
        if num_tokens != self._num_tokens:
            self._since_s, self._num_tokens, self._num_repeats = self._clock(), num_tokens, 0
        self._is_pausing = True
        if error.replica_id not in self.replica_ids:
            self.replica_ids |= {error.replica_id}
            return 0.0
        self._num_repeats += 1
        return float(min(0.1 * 2 ** (self._num_repeats - 1), _LONGEST_PAUSE_S))
