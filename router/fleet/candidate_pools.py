"""The replicas of one model, and which of them may take a request: alone, or together."""

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
"""Replicas fall silent: who may take work is found out this often even if nothing is reported."""


class ReplicaPools:
    """Owns the states of one model's replicas.

    A pool that is empty, or all of whose replicas drain, hang, are silent or reserved, is replaced by the other: a request
    is then served by one replica alone.
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
        """Whether any replica, usable or not, is of it."""
        return self._has_prefill_pool

    def add(self, state: ReplicaState) -> None:
        """A new replica, or a new life of a known one."""
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
        """Takes a replica's new load into the first estimates."""
        self._whole.update(state)
        self._prefill.update(state)

    def is_usable(self, state: ReplicaState) -> bool:
        return not (state.is_draining or state.is_fenced or state.replica_id in self._solitary.reserved)

    def count_by_state(self) -> Counter[str]:
        """How many are usable, draining, fenced and reserved."""
        counts: Counter[str] = Counter(usable=0, draining=0, fenced=0, reserved=0)
        for state in self:
            is_usable = self.is_usable(state)
            counts["usable" if is_usable else "fenced" if state.is_fenced else "draining" if state.is_draining else "reserved"] += 1
        return counts

    def count_usable_by_pool(self) -> Counter[str]:
        """Usable ones by role; a pool all of whose replicas are not counts 0."""
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
        """What the policy is to see: at most `num` candidates of each pool; None when nobody can take the request.

        A silent replica is left out while another reports, and so is one that failed this request while another has not.
        `cached` and `pending` are leading blocks of the prompt by replica.
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
            return tuple([state.snapshot(now_s, cached.get(state.replica_id, 0), pending.get(state.replica_id, 0)) for state in states])

        return ClusterSnapshot(
            now_s=now_s,
            replicas=show(whole, whole_states),
            prefill=show(prefill, prefill_states) if prefill_states else (),
        )

    def _look(self, now_s: float) -> None:
        """Replicas that report and neither drain, hang nor are reserved; silent ones only when all are silent."""
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
