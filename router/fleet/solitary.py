"""Requests that must run alone: they were present when replicas died, and may be the cause."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from router.fleet.replica_state import ReplicaState
from router.snapshot import RoutingRequest


class SolitaryRequests:
    """Owns these requests and the replica that each has reserved.

    A reserved replica gets no other requests. Once the requests there have ended, the solitary one is dispatched to it; its release
    frees the replica again. Each request reserves the free replica with the fewest requests.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[RoutingRequest, float]] = {}  # request id -> request and time, in order of arrival
        self._reserved: dict[str, str] = {}  # request id -> replica id; kept while it runs

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def waiting(self) -> list[RoutingRequest]:
        return [request for request, _ in self._waiting.values()]

    @property
    def reserved(self) -> Collection[str]:
        """Ids of the replicas that others must not use."""
        return set(self._reserved.values())

    def add(self, request: RoutingRequest, now_s: float) -> None:
        self._waiting[request.request_id] = (request, now_s)

    def take_older_than(self, submitted_s: float) -> list[RoutingRequest]:
        """Removes and returns the requests that wait since `submitted_s` or longer."""
        overdue = [request for request, since_s in self._waiting.values() if since_s <= submitted_s]
        for request in overdue:
            self.end(request.request_id)
        return overdue

    def end(self, request_id: str) -> bool:
        """Forgets a request that was cancelled or released; False when it is unknown here."""
        is_waiting = self._waiting.pop(request_id, None) is not None
        return self._reserved.pop(request_id, None) is not None or is_waiting

    def take_ready(self, replicas: Iterable[ReplicaState]) -> list[tuple[RoutingRequest, ReplicaState]]:
        """Reserves replicas among the given usable ones; removes and returns the requests whose replica is empty."""
        usable = {replica.replica_id: replica for replica in replicas}
        ready: list[tuple[RoutingRequest, ReplicaState]] = []
        for request_id, (request, _) in list(self._waiting.items()):
            replica = usable.get(self._reserved.get(request_id, ""))
            if replica is None:
                taken = self.reserved
                free = [state for state in usable.values() if state.replica_id not in taken]
                if not free:
                    self._reserved.pop(request_id, None)
                    continue
                # A replica that already failed the request is used only when there is no other.
                replica = min(free, key=lambda state: (state.replica_id in request.excluded_replicas, state.num_present, state.replica_id))
                self._reserved[request_id] = replica.replica_id
            if replica.num_present == 0:
                del self._waiting[request_id]
                ready.append((request, replica))
        return ready
