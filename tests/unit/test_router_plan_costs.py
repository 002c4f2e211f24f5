from __future__ import annotations

from dataclasses import replace

import pytest

from router.policies.plan_costs import Plan, PlanCosts
from router.policies.replica_costs import ReplicaCosts, ScoringWeights
from router.snapshot import ClusterSnapshot, LoadBehind, ReplicaLoad, ReplicaSnapshot, RoutingRequest

STATS = ReplicaLoad(
    num_blocks=1_000, num_free_blocks=1_000, prefill_tokens_per_s=1_000.0, decode_step_s=0.01, transfer_tokens_per_s=4_000.0
)
PREFILL = ReplicaSnapshot(replica_id="p", stats=STATS, max_num_seqs=8, block_size=16, role="prefill")
DECODE = PREFILL._replace(replica_id="d", role="decode")
REQUEST = RoutingRequest(request_id="q", model="m", num_prompt_tokens=320, max_tokens=100)


def plans(
    prefill: ReplicaSnapshot = PREFILL, decode: ReplicaSnapshot = DECODE, request: RoutingRequest = REQUEST, now_s: float = 0.0
) -> dict[str, Plan]:
    """By name; their terms add up to their costs."""
    costs = ReplicaCosts(ScoringWeights(), expected_output_tokens=256, default_ttft_slo_s=10.0)
    snapshot = ClusterSnapshot(now_s=now_s, replicas=(decode,), prefill=(prefill,))
    found = {plan.name: plan for plan in PlanCosts(costs).plans(request, snapshot)}
    for plan in found.values():
        assert plan.score.cost_s == pytest.approx(sum(value for _, value in plan.score.terms))
    return found


def terms(name: str, **changed: ReplicaSnapshot) -> dict[str, float]:
    return dict(plans(**changed)[name].score.terms)


def busy(replica: ReplicaSnapshot, **stats: float) -> ReplicaSnapshot:
    return replica._replace(stats=replica.stats._replace(**stats))


def test_plans_are_the_pair_and_each_replica_alone() -> None:
    found = plans()
    assert set(found) == {"p d", "d d", "p p"}
    assert (found["p d"].score.prefill_replica_id, found["p d"].score.replica_id) == ("p", "d")
    assert set(plans(request=replace(REQUEST, is_whole=True))) == {"d d", "p p"}
    assert set(plans(decode=DECODE._replace(role="unified"))) == {"d d", "p p"}, "only a decode replica takes KV over"


def test_pair_costs_prefill_the_step_that_takes_the_kv_in_and_decoding() -> None:
    assert {name: value for name, value in terms("p d").items() if value} == pytest.approx(
        {
            "prefill": 0.32,
            "handoff": 0.01,  # 80 ms of transfer hide behind 320 ms of prefill
            "decode": 0.25 * 100 * 0.01,
            "crowding": 0.25 * 100 * 0.01 * max(1 / 8, 420 / 16_000),
        }
    )
    assert plans()["p d"].ttft_s == pytest.approx(0.32), "the first token comes from the prefill replica"


def test_handoff_counts_the_part_of_transfer_and_of_the_wait_for_a_slot_that_the_prefill_does_not_hide() -> None:
    # 320 ms of prefill against 640 ms of transfer
    assert terms("p d", decode=busy(DECODE, transfer_tokens_per_s=500.0))["handoff"] == pytest.approx(0.64 - 0.32 + 0.01)
    # what the decode replica holds does not move
    holding = busy(DECODE, transfer_tokens_per_s=500.0)._replace(num_cached_blocks=15, num_pending_blocks=15)
    assert terms("p d", decode=holding)["handoff"] == pytest.approx(0.01)
    # 4 too many for 8 slots, each held for 256 steps: 1.28 s, of which 0.2 s of queue and 0.32 s of prefill pass elsewhere
    waiting = busy(PREFILL, num_uncomputed_tokens=200)
    assert terms("p d", prefill=waiting, decode=busy(DECODE, num_running=11))["handoff"] == pytest.approx(1.28 - 0.52 + 0.01)


def test_prefill_side_ignores_who_runs_beside_and_the_decode_side_alone_does_not() -> None:
    assert "slowdown" not in terms("p d", prefill=busy(PREFILL, num_running=4))
    # a step of 10 ms becomes one of 320 ms, and nearly stays what it was with 2 tokens more
    assert terms("d d", decode=busy(DECODE, num_running=4))["slowdown"] == pytest.approx(4 * 4 * 0.31, rel=0.01)
    alone = plans(decode=busy(DECODE, num_running=4), request=replace(REQUEST, num_prompt_tokens=2))["d d"]
    assert dict(alone.score.terms)["slowdown"] == pytest.approx(4 * 4 * 0.0002, rel=0.02)


def test_streams_that_step_aside_on_a_decode_replica_lose_the_whole_prefill() -> None:
    aside = busy(DECODE, num_running=4)._replace(behind=LoadBehind(num_running=3))
    # 320 ms each; the fourth decodes beside, in a step of about 320 ms instead of 10
    assert terms("d d", decode=aside)["slowdown"] == pytest.approx(4 * (3 * 0.32 + 0.31), rel=0.01)


def test_decode_replica_alone_saves_nothing_by_kv_that_is_on_its_way() -> None:
    expecting = DECODE._replace(num_cached_blocks=5, num_pending_blocks=15)
    assert terms("d d", decode=expecting)["pending"] == 0
    assert terms("d d", decode=expecting)["prefill"] == pytest.approx(0.24)


def test_prefill_replica_alone_pays_for_each_second_of_its_answer() -> None:
    assert terms("p p")["misplaced"] == pytest.approx(100 * 0.01)


def test_crowding_is_the_share_of_slots_or_blocks_whichever_is_more_and_counts_bookings() -> None:
    answer_s = 0.25 * 100 * 0.01
    booked = busy(DECODE, num_running=2)._replace(num_booked_requests=3)
    assert terms("p d", decode=booked)["crowding"] == pytest.approx(answer_s * 6 / 8)
    held = busy(DECODE, num_free_blocks=200)._replace(num_booked_context_tokens=1_600, num_cached_blocks=10)
    assert terms("p d", decode=held)["crowding"] == pytest.approx(answer_s * (800 + (1_600 + 160 + 100) / 16) / 1_000)


def test_computed_token_costs_the_same_capacity_in_both_pools() -> None:
    used = PREFILL._replace(recent_work_s=900.0)
    assert terms("d d", prefill=used)["capacity"] == pytest.approx(terms("p d", prefill=used)["capacity"])
    assert terms("p d", prefill=used)["capacity"] == pytest.approx(16 * 0.32)


def test_deadline_is_that_of_the_first_token_wherever_it_is_computed() -> None:
    late = busy(PREFILL, num_uncomputed_tokens=500)
    found = plans(prefill=late, request=replace(REQUEST, deadline_s=100.5), now_s=100.0)
    assert dict(found["p d"].score.terms)["overdue"] == pytest.approx(20 + 0.82 - 0.5)
    assert dict(found["d d"].score.terms)["overdue"] == 0


def test_pairs_shown_are_each_replica_with_its_cheapest_partner() -> None:
    costs = ReplicaCosts(ScoringWeights(), expected_output_tokens=256, default_ttft_slo_s=10.0)
    prefill = tuple(busy(PREFILL, num_uncomputed_tokens=1_000 * number)._replace(replica_id=f"p{number}") for number in range(3))
    decode = tuple(busy(DECODE, num_running=number)._replace(replica_id=f"d{number}") for number in range(3))
    found = PlanCosts(costs).plans(REQUEST, ClusterSnapshot(now_s=0.0, replicas=decode, prefill=prefill))
    pairs = {plan.name for plan in found if plan.score.prefill_replica_id}
    assert pairs == {"p0 d0", "p1 d0", "p2 d0", "p0 d1", "p0 d2"}
    assert min(found, key=lambda plan: plan.score.cost_s).name == "d0 d0", "nobody decodes there yet"
