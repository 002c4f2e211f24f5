"""A first estimate over all replicas, so that a policy examines only the promising ones in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from router.replica_state import ReplicaState


class CandidatePreview:
    """Owns one number a replica and ranks by it: predicted end of its queue, plus recent work, less what a prefix saves.

    A thousand replicas cost a vector operation; Python touches only those that hold a part of the prompt.
    """

    def __init__(self, states: Sequence[ReplicaState]) -> None:
        """`states` in ascending order of id."""
        self.states = states
        self._positions = {state.replica_id: position for position, state in enumerate(states)}
        self._busy_until_s = np.array([state.busy_until_s for state in states])
        self._preview_s = np.array([state.preview_s for state in states])

    def update(self, state: ReplicaState) -> None:
        """Takes a replica's new numbers over; one that is not among `states` is ignored."""
        position = self._positions.get(state.replica_id)
        if position is not None:
            self._busy_until_s[position] = state.busy_until_s
            self._preview_s[position] = state.preview_s

    def best(
        self, num: int, now_s: float, cached: Mapping[str, int], pending: Mapping[str, int], excluded: frozenset[str] = frozenset()
    ) -> list[ReplicaState]:
        """The `num` cheapest states, in ascending order of id; `cached` and `pending` are leading blocks by replica."""
        estimates = np.maximum(self._busy_until_s, now_s) + self._preview_s
        for depths in (cached, pending):
            # what all of them have in common favours none: skipped, because a system prompt is held by every replica
            common = min(depths.values()) if len(depths) >= len(self.states) else 0
            for replica_id, depth in depths.items():
                if depth > common and (position := self._positions.get(replica_id)) is not None:
                    state = self.states[position]
                    already = min(depth, cached.get(replica_id, 0)) if depths is pending else common
                    estimates[position] -= (depth - already) * state.block_size / state.prefill_tokens_per_s
        for replica_id in excluded & self._positions.keys():
            estimates[self._positions[replica_id]] = np.inf
        if num >= len(self.states):
            return list(self.states)
        return [self.states[position] for position in sorted(np.argpartition(estimates, num)[:num].tolist())]
