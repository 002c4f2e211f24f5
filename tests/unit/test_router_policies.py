from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from router.config import RouterConfig
from router.policies.policy import ConsistentHash, LeastLoaded, LongestPrefix, PairedPools, PowerOfTwo, RoundRobin, rendezvous_weight
from router.policies.policy_choice import make_policy
from router.snapshot import CandidateLoad, ClusterSnapshot, ReplicaLoad, ReplicaSnapshot, RoutingRequest


def replica(replica_id: str, *, running: int = 0, booked: int = 0, tokens: int = 0, cached: int = 0, pending: int = 0) -> ReplicaSnapshot:
    return ReplicaSnapshot(
        replica_id=replica_id,
        stats=ReplicaLoad(num_running=running, num_context_tokens=tokens, num_blocks=1_000, num_free_blocks=1_000),
        max_num_seqs=64,
        block_size=16,
        num_cached_blocks=cached,
        num_pending_blocks=max(cached, pending),
        num_booked_requests=booked,
    )


def snapshot(*replicas: ReplicaSnapshot) -> ClusterSnapshot:
    return ClusterSnapshot(now_s=0.0, replicas=replicas)


def request(num_blocks: int = 10, name: str = "q") -> RoutingRequest:
    keys = tuple(f"{name}{position}".encode() for position in range(num_blocks))
    return RoutingRequest(request_id=name, model="m", num_prompt_tokens=16 * num_blocks, max_tokens=10, block_keys=keys)


def test_round_robin_takes_turns_with_the_seed() -> None:
    replicas = snapshot(replica("a"), replica("b"), replica("c"))
    assert [RoundRobin().choose(request(), replicas, seed).replica_id for seed in range(5)] == ["a", "b", "c", "a", "b"]


def test_least_loaded_counts_bookings() -> None:
    chosen = LeastLoaded().choose(request(), snapshot(replica("a", running=2, booked=3), replica("b", running=4)), 0)
    assert chosen.replica_id == "b"


def test_least_loaded_tie_goes_to_fewer_tokens() -> None:
    chosen = LeastLoaded().choose(request(), snapshot(replica("a", running=1, tokens=900), replica("b", running=1, tokens=10)), 0)
    assert chosen.replica_id == "b"


def test_power_of_two_never_takes_the_busiest_and_is_decided_by_the_seed() -> None:
    replicas = snapshot(*[replica(str(number), running=number) for number in range(5)])
    sent = Counter(PowerOfTwo().choose(request(), replicas, seed).replica_id for seed in range(500))
    assert "4" not in sent
    # the least of two out of five is the idlest with probability 4/10
    assert sent["0"] == pytest.approx(200, abs=50)
    assert PowerOfTwo().choose(request(), replicas, 7) == PowerOfTwo().choose(request(), replicas, 7)


def test_longest_prefix_prefers_depth_under_the_cap() -> None:
    idle, warm = replica("a"), replica("b", cached=8, tokens=1_000)
    assert LongestPrefix().choose(request(), snapshot(idle, warm), 0).replica_id == "b"
    overloaded = replica("b", cached=8, tokens=100_000)
    assert LongestPrefix().choose(request(), snapshot(idle, overloaded), 0).replica_id == "a"


def test_longest_prefix_shared_system_prompt_counts_as_no_match() -> None:
    busy, idle = replica("a", cached=1, tokens=50), replica("b")
    assert LongestPrefix().choose(request(40), snapshot(busy, idle), 0).replica_id == "b"


def test_consistent_hash_moves_only_the_keys_of_a_lost_replica() -> None:
    replicas = [replica(str(number)) for number in range(5)]
    requests = [request(name=f"q{number}") for number in range(400)]
    before = [ConsistentHash().choose(asked, snapshot(*replicas), 0).replica_id for asked in requests]
    after = [ConsistentHash().choose(asked, snapshot(*replicas[:-1]), 0).replica_id for asked in requests]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != "4")
    assert all(count == pytest.approx(80, abs=30) for count in Counter(before).values())


def test_rendezvous_weight_is_fixed() -> None:
    assert rendezvous_weight(b"key", "r0") == rendezvous_weight(b"key", "r0")
    assert rendezvous_weight(b"key", "r0") != rendezvous_weight(b"key", "r1")


def test_decision_explains_the_loads_it_saw() -> None:
    decision = LeastLoaded().choose(request(), snapshot(replica("a", running=2, tokens=7), replica("b", running=4)), 0)
    assert decision.candidates == (
        CandidateLoad(replica_id="a", num_requests=2, num_tokens=7),
        CandidateLoad(replica_id="b", num_requests=4, num_tokens=0),
    )


@pytest.mark.parametrize("name", ["scoring", "least_loaded", "round_robin", "power_of_two", "longest_prefix", "consistent_hash"])
def test_make_policy_every_name_decides_among_one(name: str) -> None:
    policy = make_policy(RouterConfig(policy=name))  # type: ignore[arg-type]
    assert policy.choose(request(0), snapshot(replica("only")), 3).replica_id == "only"


def test_paired_pools_choose_by_the_rule_in_each_pool() -> None:
    prefill = tuple(replica(f"p{number}", running=number, cached=number)._replace(role="prefill") for number in range(3))
    decode = tuple(replica(f"d{number}", running=2 - number)._replace(role="decode") for number in range(3))
    pools = ClusterSnapshot(now_s=0.0, replicas=decode, prefill=prefill)
    chosen = PairedPools(LeastLoaded()).choose(request(), pools, 0)
    assert (chosen.prefill_replica_id, chosen.replica_id, chosen.replica_role) == ("p0", "d2", "decode")
    by_prefix = PairedPools(LongestPrefix()).choose(request(), pools, 0)
    assert (by_prefix.prefill_replica_id, by_prefix.num_cached_tokens) == ("p2", 32)
    assert {score.replica_id for score in chosen.candidates} == {"p0", "p1", "p2", "d0", "d1", "d2"}
    whole = PairedPools(LeastLoaded()).choose(replace(request(), is_whole=True), pools, 0)
    assert (whole.prefill_replica_id, whole.replica_id) == (None, "d2")
    assert PairedPools(LeastLoaded()).choose(request(), snapshot(replica("a")), 0) == LeastLoaded().choose(
        request(), snapshot(replica("a")), 0
    )
