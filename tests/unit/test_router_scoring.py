from __future__ import annotations

from dataclasses import replace

import pytest

from router.policies.replica_costs import ScoringWeights
from router.policies.scoring import ScoringPolicy
from router.snapshot import RECENT_WORK_S, CandidateScore, ClusterSnapshot, LoadBehind, ReplicaLoad, ReplicaSnapshot, RoutingRequest

REPLICA = ReplicaSnapshot(
    replica_id="r0",
    stats=ReplicaLoad(num_blocks=1_000, num_free_blocks=1_000, prefill_tokens_per_s=1_000.0, decode_step_s=0.01),
    max_num_seqs=8,
    block_size=16,
)
REQUEST = RoutingRequest(request_id="q", model="m", num_prompt_tokens=320, max_tokens=100, block_keys=tuple(bytes([n]) for n in range(20)))


def score(request: RoutingRequest, *replicas: ReplicaSnapshot, now_s: float = 0.0, **weights: float) -> tuple[CandidateScore, ...]:
    policy = ScoringPolicy(ScoringWeights(**weights))
    return policy.choose(request, ClusterSnapshot(now_s=now_s, replicas=replicas), 0).candidates


def terms(replica: ReplicaSnapshot, request: RoutingRequest = REQUEST, **weights: float) -> dict[str, float]:
    (only,) = score(request, replica, **weights)
    assert only.cost_s == pytest.approx(sum(value for _, value in only.terms))
    return dict(only.terms)


def with_stats(**fields: float) -> ReplicaSnapshot:
    return REPLICA._replace(stats=REPLICA.stats._replace(**fields))


def test_idle_replica_costs_its_prefill_and_decode() -> None:
    assert terms(REPLICA, decode=0.25) == pytest.approx(
        {
            "wait": 0,
            "prefill": 0.32,
            "pending": 0,
            "capacity": 0,
            "queueing": 0,
            "slowdown": 0,
            "eviction": 0,
            "decode": 0.25 * 100 * 0.01,
            "balance": 0,
        }
    )


def test_cached_blocks_save_prefill_and_pending_ones_most_of_it() -> None:
    cached = terms(REPLICA._replace(num_cached_blocks=10, num_pending_blocks=15), pending=0.9)
    assert cached["prefill"] == pytest.approx(0.16)
    assert cached["pending"] == pytest.approx(-0.9 * 0.08)
    # the last token is always computed
    assert terms(REPLICA._replace(num_cached_blocks=20, num_pending_blocks=20))["prefill"] == pytest.approx(0.001)


def test_wait_is_reported_prefill_less_what_went_since_plus_bookings() -> None:
    queued = with_stats(num_uncomputed_tokens=2_000)._replace(report_age_s=0.5, num_booked_prefill_tokens=300)
    assert terms(queued)["wait"] == pytest.approx(2.0 - 0.5 + 0.3)


def test_wait_for_a_slot_follows_littles_law() -> None:
    # one request too many for 8 slots, each held for 256 steps of 10 ms
    assert terms(with_stats(num_running=8))["wait"] == pytest.approx(256 * 0.01 / 8)


def test_wait_for_blocks_follows_littles_law() -> None:
    # 320 + 100 tokens need 26.25 blocks, 6.25 more than are free; 980 are held for 2.56 s each
    assert terms(with_stats(num_free_blocks=20))["wait"] == pytest.approx(6.25 * 2.56 / 980)


def test_slowdown_counts_those_who_decode_beside() -> None:
    assert terms(with_stats(num_running=4), slowdown=0.1)["slowdown"] == pytest.approx(0.1 * 4 * 0.32)


BEHIND = LoadBehind(num_running=6, num_waiting=2, num_uncomputed_tokens=1_600, num_context_tokens=8_000, num_booked_prefill_tokens=100)


def test_less_urgent_prompts_slots_and_blocks_are_not_waited_for() -> None:
    queued = with_stats(num_running=8, num_waiting=3, num_uncomputed_tokens=2_000, num_free_blocks=5)
    queued = queued._replace(num_booked_prefill_tokens=300)
    # by blocks the wait would be the shorter one: (26.25 - 5) * 2.56 / 995
    assert terms(queued)["wait"] == pytest.approx(2.0 + 0.3)
    # 8,000 tokens of context are 500 blocks, and 2 of 8 slots are left to those ahead
    assert terms(queued._replace(behind=BEHIND))["wait"] == pytest.approx(0.4 + 0.2)


def test_prompt_is_faster_by_the_share_of_decodes_that_step_aside_and_slows_all_down_by_its_own_time() -> None:
    busy = with_stats(num_running=8, num_context_tokens=8_000, prefill_tokens_per_s=200.0, urgent_tokens_per_s=1_000.0)
    assert terms(busy)["prefill"] == pytest.approx(320 / 200)
    found = terms(busy._replace(behind=BEHIND), slowdown=0.1)
    assert found["prefill"] == pytest.approx(320 / (200 + 6 / 8 * 800))
    assert found["slowdown"] == pytest.approx(0.1 * 8 * 320 / 800)
    # a replica whose streams never step aside has no such rate
    slow = busy._replace(behind=BEHIND, stats=busy.stats._replace(urgent_tokens_per_s=None))
    assert terms(slow)["prefill"] == pytest.approx(320 / 200)


def test_eviction_costs_only_what_blank_blocks_do_not_hold() -> None:
    # 26.25 new blocks, 10 blank ones: 16.25 blocks of 16 ms each fall out of the cache
    assert terms(with_stats(num_cached_blocks=990), eviction=0.5)["eviction"] == pytest.approx(0.5 * 16.25 * 0.016)
    assert terms(with_stats(num_cached_blocks=500), eviction=0.5)["eviction"] == 0


def test_balance_counts_recent_work_beyond_the_tolerance() -> None:
    replicas = [REPLICA._replace(replica_id=f"r{number}", recent_work_s=work_s) for number, work_s in enumerate((50.0, 51.0, 60.0))]
    balance = [dict(scored.terms)["balance"] for scored in score(REQUEST, *replicas, balance=0.1, tolerance=0.03)]
    # three hundredths of each second settle ties; beyond 51.5 s each costs a tenth more
    assert balance == pytest.approx([0.0, 0.03, 0.3 + 0.1 * 8.5])


def test_queueing_prices_prefill_by_utilization() -> None:
    # half busy, so one other second is lost for each of ours
    assert terms(REPLICA._replace(recent_work_s=0.5 * RECENT_WORK_S), queueing=1.0)["queueing"] == pytest.approx(0.32)
    # and never more than at 90 % utilization
    assert terms(REPLICA._replace(recent_work_s=3 * RECENT_WORK_S), queueing=1.0)["queueing"] == pytest.approx(9 * 0.32)


def test_capacity_prices_work_alike_on_fast_and_slow_replicas_and_by_how_busy_they_are() -> None:
    for utilization, share in ((1.0, 1.0), (0.25, 1.0), (0.125, 0.5), (0.0, 0.0)):
        work_s = utilization * RECENT_WORK_S
        fast = with_stats(prefill_tokens_per_s=3_000.0)._replace(recent_work_s=work_s)
        cached = REPLICA._replace(num_cached_blocks=10, num_pending_blocks=10, recent_work_s=work_s)
        capacity = [dict(scored.terms)["capacity"] for scored in score(REQUEST, fast, cached, capacity=2.0)]
        # 320 and 160 tokens at the mean rate of 2,000 tokens/s
        assert capacity == pytest.approx([share * 2 * 0.16, share * 2 * 0.08])


def test_deadline_that_would_be_missed_costs_more() -> None:
    request = replace(REQUEST, deadline_s=100.2)
    (only,) = score(request, REPLICA, now_s=100.0, overdue=3.0, miss_s=5.0)
    assert dict(only.terms)["overdue"] == pytest.approx(5.0 + 3.0 * 0.12)
    (in_time,) = score(request, REPLICA, now_s=99.8, overdue=3.0, miss_s=5.0)
    assert dict(in_time.terms)["overdue"] == 0


def test_request_without_deadline_is_overdue_after_the_default_one() -> None:
    policy = ScoringPolicy(ScoringWeights(overdue=3.0, miss_s=5.0), default_ttft_slo_s=10.0)
    request = replace(REQUEST, arrival_s=100.0)
    overdue = []
    for now_s in (109.6, 109.8):
        (only,) = policy.choose(request, ClusterSnapshot(now_s=now_s, replicas=(REPLICA,)), 0).candidates
        overdue.append(dict(only.terms)["overdue"])
    assert overdue == pytest.approx([0, 5.0 + 3.0 * 0.12])


def test_ties_go_by_prefix_not_by_order_and_keep_to_it() -> None:
    replicas = [REPLICA._replace(replica_id=f"r{number}") for number in range(8)]
    policy = ScoringPolicy()
    chosen = set()
    for number in range(40):
        keys = tuple(bytes([number, position]) for position in range(20))
        request = replace(REQUEST, block_keys=keys)
        first = policy.choose(request, ClusterSnapshot(now_s=0.0, replicas=tuple(replicas)), 0).replica_id
        again = policy.choose(replace(request, request_id="other"), ClusterSnapshot(now_s=9.0, replicas=tuple(replicas)), 5).replica_id
        assert first == again
        chosen.add(first)
    assert len(chosen) >= 6


def test_prediction_is_wait_and_prefill_and_a_step() -> None:
    queued = with_stats(num_uncomputed_tokens=1_000)
    decision = ScoringPolicy().choose(REQUEST, ClusterSnapshot(now_s=0.0, replicas=(queued,)), 0)
    assert decision.predicted_ttft_s == pytest.approx(1.0 + 0.32 + 0.01)
