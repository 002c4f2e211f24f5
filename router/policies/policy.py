"""How a replica is chosen: the Protocol, and the classics that everything else is measured against.

A policy is a pure function of (request, snapshot, seed): no clock, no I/O, no memory. Whatever looks like memory in a
classic (the turn of round robin, the dice of power of two choices) comes in through the seed, which the router counts up
by one a decision. All of them see bookings, so a burst spreads.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from router.snapshot import CandidateLoad, ClusterSnapshot, Decision, ReplicaSnapshot, RoutingRequest


class Policy(Protocol):
    """Chooses one replica of a snapshot that has at least one; the same inputs give the same decision."""

    @property
    def examines_all(self) -> bool:
        """False lets the router pass only the replicas that a first estimate finds most promising."""
        ...

    def choose(self, request: RoutingRequest, snapshot: ClusterSnapshot, seed: int) -> Decision: ...


class PairedPools:
    """Gives a classic two pools: its rule chooses in each of them, and the two make the pair."""

    def __init__(self, rule: Policy) -> None:
        self._rule = rule

    @property
    def examines_all(self) -> bool:
        return self._rule.examines_all

    def choose(self, request: RoutingRequest, snapshot: ClusterSnapshot, seed: int) -> Decision:
        if not snapshot.prefill:
            return self._rule.choose(request, snapshot, seed)
        runs = self._rule.choose(request, ClusterSnapshot(now_s=snapshot.now_s, replicas=snapshot.replicas), seed)
        if request.is_whole or runs.replica_role != "decode":
            return runs
        computes = self._rule.choose(request, ClusterSnapshot(now_s=snapshot.now_s, replicas=snapshot.prefill), seed)
        return replace(
            runs,
            prefill_replica_id=computes.replica_id,
            predicted_ttft_s=computes.predicted_ttft_s,
            num_cached_tokens=computes.num_cached_tokens,
            candidates=(*computes.candidates, *runs.candidates),
        )


class RoundRobin:
    """Each in turn."""

    examines_all = True

    def choose(self, request: RoutingRequest, snapshot: ClusterSnapshot, seed: int) -> Decision:
        replicas = snapshot.replicas
        return _decision(request, replicas[seed % len(replicas)], snapshot)


class LeastLoaded:
    """The fewest requests in the replica, booked ones included; ties go to the least context, then to the lowest id."""

    examines_all = True

    def choose(self, request: RoutingRequest, snapshot: ClusterSnapshot, seed: int) -> Decision:
        return _decision(request, min(snapshot.replicas, key=load_order), snapshot)


class PowerOfTwo:
    """The less loaded of two drawn at random (Mitzenmacher, IEEE TPDS 12(10), 2001)."""

    examines_all = True

    def choose(self, request: RoutingRequest, snapshot: ClusterSnapshot, seed: int) -> Decision:
        replicas = snapshot.replicas
        drawn = random.Random(seed).sample(replicas, min(2, len(replicas)))
        return _decision(request, min(drawn, key=load_order), snapshot)


class LongestPrefix:
    """The longest cached (or soon cached) prefix among replicas under a load cap; ties go to the least loaded, then to the
    one with the least work lately.

    The cap is `max_ratio` times the mean load plus `slack`, the rule of consistent hashing with bounded loads
    (arXiv 1608.01350); load is tokens in the replica. A match shorter than `min_share` of the prompt counts as none, as in
    SGLang's router: a system prompt that everybody shares is no reason to go anywhere.
    """

    examines_all = True

    def __init__(self, *, max_ratio: float = 1.25, slack_tokens: int = 8_192, min_share: float = 0.1) -> None:
        self._max_ratio = max_ratio
        self._slack_tokens = slack_tokens
        self._min_share = min_share

    def choose(self, request: RoutingRequest, snapshot: ClusterSnapshot, seed: int) -> Decision:
        replicas = snapshot.replicas
        cap = self._max_ratio * sum(map(num_tokens, replicas)) / len(replicas) + self._slack_tokens
        open_replicas = [replica for replica in replicas if num_tokens(replica) <= cap]
        least = self._min_share * len(request.block_keys)

        def order(replica: ReplicaSnapshot) -> tuple[int, int, float, str]:
            depth = max(replica.num_cached_blocks, replica.num_pending_blocks)
            return (-depth if depth > least else 0, num_tokens(replica), replica.recent_work_s, replica.replica_id)

        return _decision(request, min(open_replicas, key=order), snapshot)


class ConsistentHash:
    """Rendezvous hashing of the prompt's first blocks (Thaler and Ravishankar, IEEE/ACM ToN 6(1), 1998), loads ignored.

    `num_blocks` of the prompt make the key, so that conversations with one system prompt still part.
    """

    examines_all = True

    def __init__(self, *, num_blocks: int = 4) -> None:
        self._num_blocks = num_blocks

    def choose(self, request: RoutingRequest, snapshot: ClusterSnapshot, seed: int) -> Decision:
        keys = request.block_keys
        key = keys[min(self._num_blocks, len(keys)) - 1] if keys else request.request_id.encode()
        return _decision(request, max(snapshot.replicas, key=lambda replica: rendezvous_weight(key, replica.replica_id)), snapshot)


def rendezvous_weight(key: bytes, replica_id: str) -> int:
    """A fixed random number for the pair; the replica with the largest owns the key."""
    return int.from_bytes(hashlib.blake2b(replica_id.encode(), key=key[:64], digest_size=8).digest(), "big")


def num_requests(replica: ReplicaSnapshot) -> int:
    """Requests in the replica or on their way to it."""
    return replica.stats.num_running + replica.stats.num_waiting + replica.num_booked_requests


def num_tokens(replica: ReplicaSnapshot) -> int:
    """Tokens in its KV, plus those that wait to be computed, plus those on their way."""
    stats = replica.stats
    return stats.num_context_tokens + stats.num_uncomputed_tokens + replica.num_booked_context_tokens


def load_order(replica: ReplicaSnapshot) -> tuple[int, int, str]:
    """Sorts the idlest first."""
    return num_requests(replica), num_tokens(replica), replica.replica_id


def cached_tokens(request: RoutingRequest, replica: ReplicaSnapshot) -> int:
    """Of the prompt, as reported."""
    return min(replica.num_cached_blocks * replica.block_size, request.num_prompt_tokens)


def prefix_key(request: RoutingRequest, replicas: Sequence[ReplicaSnapshot]) -> bytes:
    """The prompt's first block that none of the replicas holds or will hold soon; without blocks, the request's own id."""
    keys = request.block_keys
    if not keys:
        return request.request_id.encode()
    deepest = max(max(replica.num_cached_blocks, replica.num_pending_blocks) for replica in replicas)
    return keys[min(deepest, len(keys) - 1)]


_NUM_SHOWN = 8


def _decision(request: RoutingRequest, chosen: ReplicaSnapshot, snapshot: ClusterSnapshot) -> Decision:
    """A classic explains itself by the loads that it saw: of the first candidates, and of the chosen."""
    shown = snapshot.replicas[:_NUM_SHOWN]
    if chosen not in shown:
        shown = (*shown, chosen)
    stats = chosen.stats
    num_cached_tokens = cached_tokens(request, chosen)
    predicted_ttft_s = None
    if stats.prefill_tokens_per_s:
        waiting = stats.num_uncomputed_tokens + chosen.num_booked_prefill_tokens
        predicted_ttft_s = (waiting + request.num_prompt_tokens - num_cached_tokens) / stats.prefill_tokens_per_s
    return Decision(
        request_id=request.request_id,
        replica_id=chosen.replica_id,
        replica_role=chosen.role,
        predicted_ttft_s=predicted_ttft_s,
        num_cached_tokens=num_cached_tokens,
        candidates=tuple(
            CandidateLoad(replica_id=replica.replica_id, num_requests=num_requests(replica), num_tokens=num_tokens(replica))
            for replica in shown
        ),
    )
