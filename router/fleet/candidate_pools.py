"""The replicas of one model by pool, and which of them may take a request, alone or as a pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import inf

from router.config import RouterConfig
from router.fleet.preview import CandidatePreview
from router.fleet.replica_state import ReplicaState
from router.fleet.solitary import SolitaryRequests
from router.snapshot import ClusterSnapshot, ReplicaSnapshot, RoutingRequest

LOOK_AGAIN_S = 1.0
"""Which replicas may take work is determined again after this time even without a report, because replicas may fall silent."""


class ReplicaPools:
    """Owns the states of one model's replicas.

    When one pool is empty, or all its replicas drain, hang, are silent or reserved, the other pool serves whole requests, each on
    one replica.
    """

    def __init__(self, config: RouterConfig, solitary: SolitaryRequests) -> None:
        self._config = config
        self._solitary = solitary
        self._states: dict[str, ReplicaState] = {}  # in ascending order of id
        self._fenced: frozenset[str] = frozenset()
        self._whole = CandidatePreview(())
        self._prefill = CandidatePreview(())
        self._has_prefill_pool = False
        self._looked_until_s = -inf

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[ReplicaState]:
        return iter(self._states.values())

    def __getitem__(self, replica_id: str) -> ReplicaState:
        return self._states[replica_id]

    def get(self, replica_id: str) -> ReplicaState | None:
        return self._states.get(replica_id)

    @property
    def has_prefill_pool(self) -> bool:
        """Whether the prefill pool has any replica, usable or not."""
        return self._has_prefill_pool

    def add(self, state: ReplicaState) -> None:
        """Adds a replica, or replaces the state of a restarted one."""
        state.is_fenced = state.replica_id in self._fenced
        self._states[state.replica_id] = state
        self._states = dict(sorted(self._states.items()))
        self._has_prefill_pool |= state.role == "prefill"
        self.note_usable_changed()

    def remove(self, replica_id: str) -> None:
        del self._states[replica_id]
        self._has_prefill_pool = any(state.role == "prefill" for state in self)
        self.note_usable_changed()

    def set_fenced(self, replica_ids: frozenset[str]) -> None:
        self._fenced = replica_ids
        for state in self:
            state.is_fenced = state.replica_id in replica_ids
        self.note_usable_changed()

    def note_usable_changed(self) -> None:
        self._looked_until_s = -inf

    def update(self, state: ReplicaState) -> None:
        """Updates the first estimates with a replica's new load."""
        self._whole.update(state)
        self._prefill.update(state)

    def is_usable(self, state: ReplicaState) -> bool:
        return not (state.is_draining or state.is_fenced or state.replica_id in self._solitary.reserved)

    def count_by_state(self) -> Counter[str]:
        """Number of usable, draining, fenced and reserved replicas."""
        counts: Counter[str] = Counter(usable=0, draining=0, fenced=0, reserved=0)
        for state in self:
            is_usable = self.is_usable(state)
            counts["usable" if is_usable else "fenced" if state.is_fenced else "draining" if state.is_draining else "reserved"] += 1
        return counts

    def count_usable_by_pool(self) -> Counter[str]:
        """Number of usable replicas by role; 0 for a pool whose replicas are all unusable."""
        counts: Counter[str] = Counter()
        for state in self:
            counts[state.role] += self.is_usable(state)
        return counts

    @property
    def num_serving(self) -> int:
        """Replicas that neither drain nor hang."""
        return sum(not (state.is_draining or state.is_fenced) for state in self)

    def snapshot(
        self, request: RoutingRequest, now_s: float, cached: Mapping[str, int], pending: Mapping[str, int], num: int | None
    ) -> ClusterSnapshot | None:
        """The policy's view: at most `num` candidates of each pool; None when no replica can take the request.

        Silent replicas are left out while others report, and replicas that failed this request while there are others.
        `cached` and `pending` are replica id -> leading blocks of the prompt.
        """
        self._look(now_s)
        whole, prefill = self._whole, self._prefill
        whole_states, prefill_states = whole.states, prefill.states
        excluded = request.excluded_replicas
        if excluded:
            rest = [[state for state in states if state.replica_id not in excluded] for states in (whole_states, prefill_states)]
            if any(rest):
                whole_states, prefill_states = rest
            if not whole_states:
                whole, whole_states, prefill_states = prefill, prefill_states, []
        if not whole_states:
            return None

        def show(preview: CandidatePreview, states: Sequence[ReplicaState]) -> tuple[ReplicaSnapshot, ...]:
            if num is not None and len(states) > num:
                states = preview.best(num, now_s, cached, pending, excluded)
            return tuple(
                [
                    state.snapshot(now_s, cached.get(state.replica_id, 0), pending.get(state.replica_id, 0), request.priority)
                    for state in states
                ]
            )

        return ClusterSnapshot(
            now_s=now_s,
            replicas=show(whole, whole_states),
            prefill=show(prefill, prefill_states) if prefill_states else (),
        )

    def _look(self, now_s: float) -> None:
        """Determines the candidates again when due: usable replicas that report; silent ones only when all are silent."""
        if self._looked_until_s > now_s:
            return
        running = [state for state in self if self.is_usable(state)]
        timeout_s = self._config.report_timeout_s
        heard = [state for state in running if now_s - state.reported_s <= timeout_s] or running
        whole = [state for state in heard if state.role != "prefill"]
        prefill = [state for state in heard if state.role == "prefill"]
        if not whole:
            whole, prefill = prefill, []
        self._whole, self._prefill = CandidatePreview(whole), CandidatePreview(prefill)
        self._looked_until_s = now_s + LOOK_AGAIN_S
