"""A first estimate over all replicas, so that a policy examines only the promising ones in full."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import inf

from router.fleet.replica_state import ReplicaState

_AFFINITY = 20.0
"""Upper bound on the weight, in the scoring policy, of a second saved by a prefix, which also spares others."""


class CandidatePreview:
    """Owns one estimate per replica and ranks by it: predicted end of its queue, plus recent work, less the saving of a prefix.

    Flat arrays, read in one pass: between two decisions, reports evict everything else from the CPU's caches, and then numpy's
    call overhead exceeds the arithmetic of a thousand replicas.
    """

    def __init__(self, states: Sequence[ReplicaState]) -> None:
        """`states` in ascending order of id."""
        self.states = states
        self._positions = {state.replica_id: position for position, state in enumerate(states)}
        self._busy_until_s = array("d", [state.busy_until_s for state in states])
        self._preview_s = array("d", [state.preview_s for state in states])

    def update(self, state: ReplicaState) -> None:
        """Updates a replica's estimate; one that is not among `states` is ignored."""
        position = self._positions.get(state.replica_id)
        if position is not None:
            self._busy_until_s[position] = state.busy_until_s
            self._preview_s[position] = state.preview_s

    def best(
        self, num: int, now_s: float, cached: Mapping[str, int], pending: Mapping[str, int], excluded: frozenset[str] = frozenset()
    ) -> list[ReplicaState]:
        """The `num` most promising states, in ascending order of id; `cached` and `pending` are replica id -> leading blocks.

        Half of the places go to replicas that hold a part of the prompt, by their estimate with the saving weighted up; the rest to the
        cheapest.
        """
        states = self.states
        if num >= len(states):
            return list(states)
        busy = zip(self._busy_until_s, self._preview_s, strict=True)
        estimates = [(until_s if until_s > now_s else now_s) + preview_s for until_s, preview_s in busy]
        for replica_id in excluded:
            if (position := self._positions.get(replica_id)) is not None:
                estimates[position] = inf
        saved_s = self._saved_s(cached, pending)
        holders = [position for position in saved_s if estimates[position] < inf]
        holders.sort(key=lambda position: estimates[position] - _AFFINITY * saved_s[position])
        for position, seconds in saved_s.items():
            estimates[position] -= seconds
        chosen = set(holders[: num // 2])
        for position in sorted(range(len(states)), key=estimates.__getitem__):
            if len(chosen) == num:
                break
            chosen.add(position)
        return [states[position] for position in sorted(chosen)]

    def _saved_s(self, cached: Mapping[str, int], pending: Mapping[str, int]) -> dict[int, float]:
        """position -> seconds of prefill that a prefix saves there, beyond the saving on every replica."""
        # a prefix that every replica holds, such as a system prompt, favours none
        common = min(cached.values()) if len(cached) >= len(self.states) else 0
        saved: dict[int, float] = {}
        for depths, is_pending in ((cached, False), (pending, True)):
            for replica_id, depth in depths.items():
                num_blocks = depth - max(common, cached.get(replica_id, 0)) if is_pending else depth - common
                if num_blocks > 0 and (position := self._positions.get(replica_id)) is not None:
                    state = self.states[position]
                    saved[position] = saved.get(position, 0.0) + num_blocks * state.block_size / state.rates.prefill_tokens_per_s
        return saved
