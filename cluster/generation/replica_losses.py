"""The replicas that a choice lost, and what follows from that."""

from __future__ import annotations

from collections.abc import Callable

from cluster.failures import ReplicaDied, ReplicaGone
from cluster.settings.failover import FailoverPolicy

_LONGEST_PAUSE_S = 1.0


class ReplicaLosses:
    """Owns the losses of one choice, and knows how long it has been without a replica that makes progress."""

    def __init__(self, policy: FailoverPolicy, clock: Callable[[], float]) -> None:
        self.num_deaths = 0
        self.replica_ids: frozenset[str] = frozenset()
        self._policy = policy
        self._clock = clock
        self._since_s = 0.0  # of the first loss after the last token
        self._num_tokens = -1
        self._num_repeats = 0
        self._is_pausing = False

    @property
    def is_suspect(self) -> bool:
        """It was present at so many deaths that it may be their reason: where it runs next, nothing else may run."""
        return self.num_deaths >= max(2, self._policy.max_deaths - 1)

    @property
    def is_condemned(self) -> bool:
        return self.num_deaths >= self._policy.max_deaths

    @property
    def has_waited_enough(self) -> bool:
        return self._clock() - self._since_s > self._policy.replica_timeout_s

    def take_pause(self) -> float | None:
        """The first token after a loss has come: seconds since that; None when nothing was lost."""
        if not self._is_pausing:
            return None
        self._is_pausing = False
        return self._clock() - self._since_s

    def add(self, error: ReplicaGone, num_tokens: int) -> float:
        """Counts one more; `num_tokens` are out. Returns the seconds to wait before the router is asked for another.

        They grow while the same replicas are named again and again: it has no other, which changes soon (its successor
        loads) or never.
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
