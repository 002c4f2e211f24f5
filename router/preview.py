"""A first estimate over all replicas, so that a policy examines only the promising ones in full."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import inf

from router.replica_state import ReplicaState


class CandidatePreview:
    """Owns one number a replica and ranks by it: predicted end of its queue, plus recent work, less what a prefix saves.

    Flat arrays, read in one pass: a decision comes between reports that have driven everything else out of the CPU's caches,
    and numpy's start-up there costs more than the arithmetic of a thousand replicas.
    """

    def __init__(self, states: Sequence[ReplicaState]) -> None:
        """`states` in ascending order of id."""
        self.states = states
        self._positions = {state.replica_id: position for position, state in enumerate(states)}
        self._busy_until_s = array("d", [state.busy_until_s for state in states])
        self._preview_s = array("d", [state.preview_s for state in states])

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
        states, positions = self.states, self._positions
        if num >= len(states):
            return list(states)
        busy = zip(self._busy_until_s, self._preview_s, strict=True)
        estimates = [(until_s if until_s > now_s else now_s) + preview_s for until_s, preview_s in busy]
        # what all of them have in common favours none: a system prompt is held by every replica
        common = min(cached.values()) if len(cached) >= len(states) else 0
        for replica_id, depth in cached.items():
            if depth > common and (position := positions.get(replica_id)) is not None:
                state = states[position]
                estimates[position] -= (depth - common) * state.block_size / state.rates.prefill_tokens_per_s
        for replica_id, depth in pending.items():
            depth -= cached.get(replica_id, 0)
            if depth > 0 and (position := positions.get(replica_id)) is not None:
                state = states[position]
                estimates[position] -= depth * state.block_size / state.rates.prefill_tokens_per_s
        for replica_id in excluded:
            if (position := positions.get(replica_id)) is not None:
                estimates[position] = inf
        limit = sorted(estimates)[num - 1]
        chosen = [state for state, estimate in zip(states, estimates, strict=True) if estimate < limit]
        for state, estimate in zip(states, estimates, strict=True):
            if len(chosen) == num:
                break
            if estimate == limit:
                chosen.append(state)
        chosen.sort(key=_replica_id)
        return chosen


def _replica_id(state: ReplicaState) -> str:
    return state.replica_id
