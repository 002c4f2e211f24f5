"""How a replica is chosen: the Protocol, and the classics that everything else is measured against.

A policy is a pure function of (request, snapshot, seed): no clock, no I/O, no memory. Whatever looks like memory in a
classic (the turn of round robin, the dice of power of two choices) comes in through the seed, which the router counts up.
"""

from __future__ import annotations

from typing import Protocol

from router.snapshot import CandidateScore, ClusterSnapshot, Decision, ReplicaSnapshot, RoutingRequest


class Policy(Protocol):
    """Chooses one replica of a snapshot that has at least one."""

    def choose(self, request: RoutingRequest, snapshot: ClusterSnapshot, seed: int) -> Decision: ...


class LeastLoaded:
    """The fewest requests in the replica, booked ones included; ties go to the least context, then to the lowest id."""

    def choose(self, request: RoutingRequest, snapshot: ClusterSnapshot, seed: int) -> Decision:
        chosen = min(snapshot.replicas, key=lambda replica: (num_requests(replica), num_context_tokens(replica), replica.replica_id))
        return decision_for(request, chosen, snapshot, num_requests)


def num_requests(replica: ReplicaSnapshot) -> int:
    """Requests in the replica or on their way to it."""
    return replica.stats.num_running + replica.stats.num_waiting + replica.num_booked_requests


def num_context_tokens(replica: ReplicaSnapshot) -> int:
    """Tokens in its KV, plus those that wait to be computed, plus those on their way."""
    stats = replica.stats
    return stats.num_context_tokens + stats.num_uncomputed_tokens + replica.num_booked_context_tokens


def decision_for(
    request: RoutingRequest, chosen: ReplicaSnapshot, snapshot: ClusterSnapshot, load: Load, *, num_shown: int = 8
) -> Decision:
    """A classic's decision: its own measure of load as the one term of the first `num_shown` candidates and the chosen."""
    shown = snapshot.replicas[:num_shown]
    if chosen not in shown:
        shown = (*shown, chosen)
    return Decision(
        request_id=request.request_id,
        replica_id=chosen.replica_id,
        num_cached_tokens=min(chosen.num_cached_blocks * chosen.block_size, request.num_prompt_tokens),
        candidates=tuple(
            CandidateScore(replica_id=replica.replica_id, cost=float(load(replica)), terms=(("load", float(load(replica))),))
            for replica in shown
        ),
    )


class Load(Protocol):
    """A measure of how busy a replica is; any unit, smaller is idler."""

    def __call__(self, replica: ReplicaSnapshot, /) -> float: ...
