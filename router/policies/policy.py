"""The policy Protocol, and the classic policies that serve as baselines.

A policy is a pure function of (request, snapshot, seed): no clock, no I/O, no memory. The turn of round robin and the random draws of
power of two choices come from the seed, which the router increments with each decision. All policies see bookings, so a burst spreads.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from router.snapshot import CandidateLoad, ClusterSnapshot, Decision, ReplicaSnapshot, RoutingRequest


class Policy(Protocol):
    """Chooses one replica, or a pair, from a snapshot with at least one. The same inputs give the same decision."""

    @property
    def examines_all(self) -> bool:
        """False lets the router pass only the most promising replicas by a first estimate."""
        ...

    def choose(self, request: RoutingRequest, snapshot: ClusterSnapshot, seed: int) -> Decision: ...


class PairedPools:
    """Makes a classic policy choose pairs: its rule chooses one replica in each pool."""

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
    """Chooses each replica in turn."""

    examines_all = True

    def choose(self, request: RoutingRequest, snapshot: ClusterSnapshot, seed: int) -> Decision:
        replicas = snapshot.replicas
        return _decision(request, replicas[seed % len(replicas)], snapshot)


class LeastLoaded:
    """Chooses the replica with the fewest requests, booked ones included; ties go to the fewest tokens, then to the lowest id."""

    examines_all = True

    def choose(self, request: RoutingRequest, snapshot: ClusterSnapshot, seed: int) -> Decision:
        return _decision(request, min(snapshot.replicas, key=load_order), snapshot)


class PowerOfTwo:
    """Chooses the less loaded of two random replicas (Mitzenmacher, IEEE TPDS 12(10), 2001)."""

    examines_all = True

    def choose(self, request: RoutingRequest, snapshot: ClusterSnapshot, seed: int) -> Decision:
        replicas = snapshot.replicas
        drawn = random.Random(seed).sample(replicas, min(2, len(replicas)))
        return _decision(request, min(drawn, key=load_order), snapshot)


class LongestPrefix:
    """Chooses the longest cached (or soon cached) prefix among replicas under a load cap; ties go to the least loaded, then to the
    one with the least recent work.

    The cap is `max_ratio` times the mean load plus `slack_tokens`, the rule of consistent hashing with bounded loads
    (arXiv 1608.01350); load is tokens in the replica. A match shorter than `min_share` of the prompt counts as none, as in
    SGLang's router: a system prompt that all requests share must not decide.
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
    """Rendezvous hashing of the prompt's first blocks (Thaler and Ravishankar, IEEE/ACM ToN 6(1), 1998); ignores load.

    The first `num_blocks` blocks are the key, so that conversations with the same system prompt are still spread.
    """

    examines_all = True

    def __init__(self, *, num_blocks: int = 4) -> None:
        self._num_blocks = num_blocks

    def choose(self, request: RoutingRequest, snapshot: ClusterSnapshot, seed: int) -> Decision:
        keys = request.block_keys
        key = keys[min(self._num_blocks, len(keys)) - 1] if keys else request.request_id.encode()
        return _decision(request, max(snapshot.replicas, key=lambda replica: rendezvous_weight(key, replica.replica_id)), snapshot)


def rendezvous_weight(key: bytes, replica_id: str) -> int:
    """A fixed pseudo-random number for a key and a replica; the replica with the largest number owns the key."""
    return int.from_bytes(hashlib.blake2b(replica_id.encode(), key=key[:64], digest_size=8).digest(), "big")


def num_requests(replica: ReplicaSnapshot) -> int:
    """Requests in the replica or on their way to it."""
    return replica.stats.num_running + replica.stats.num_waiting + replica.num_booked_requests


def num_tokens(replica: ReplicaSnapshot) -> int:
    """Tokens in the replica's KV, waiting to be computed there, or on their way."""
    stats = replica.stats
    return stats.num_context_tokens + stats.num_uncomputed_tokens + replica.num_booked_context_tokens


def load_order(replica: ReplicaSnapshot) -> tuple[int, int, str]:
    """Sort key: the least loaded replica first."""
    return num_requests(replica), num_tokens(replica), replica.replica_id


def cached_tokens(request: RoutingRequest, replica: ReplicaSnapshot) -> int:
    """Prompt tokens that the replica reported as cached."""
    return min(replica.num_cached_blocks * replica.block_size, request.num_prompt_tokens)


def prefix_key(request: RoutingRequest, replicas: Sequence[ReplicaSnapshot]) -> bytes:
    """Key of the prompt's first block that no replica holds or will hold soon; the request's id when it has no full block."""
    keys = request.block_keys
    if not keys:
        return request.request_id.encode()
    deepest = max(max(replica.num_cached_blocks, replica.num_pending_blocks) for replica in replicas)
    return keys[min(deepest, len(keys) - 1)]


_NUM_SHOWN = 8


def _decision(request: RoutingRequest, chosen: ReplicaSnapshot, snapshot: ClusterSnapshot) -> Decision:
    """A decision with the loads of the first candidates and of the chosen one as its explanation."""
    shown = snapshot.replicas[:_NUM_SHOWN]
    if chosen not in shown:
        shown = (*shown, chosen)
    met = chosen.without_behind
    stats = met.stats
    num_cached_tokens = cached_tokens(request, chosen)
    predicted_ttft_s = None
    if stats.prefill_tokens_per_s:
        waiting = stats.num_uncomputed_tokens + met.num_booked_prefill_tokens
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
