from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest

from replicas.stats import ReplicaReport, ReplicaStats, TierLoad
from router.fleet.bookings import Booking
from router.fleet.preview import CandidatePreview
from router.fleet.rates import Rates
from router.fleet.replica_state import ReplicaState
from router.snapshot import RECENT_WORK_S, LoadBehind, RoutingRequest

RATES = Rates(prefill_tokens_per_s=1_000.0, decode_step_s=0.01)


def report(replica_id: str = "r0", **stats: object) -> ReplicaReport:
    fields = {"num_blocks": 1_000, "num_free_blocks": 1_000} | stats
    return ReplicaReport(
        replica_id=replica_id,
        model="m",
        epoch=1,
        stats=ReplicaStats(**fields),  # type: ignore[arg-type]
        block_size=16,
        max_num_seqs=4,
        first_event=0,
    )


def state(replica_id: str = "r0", now_s: float = 0.0, **stats: object) -> ReplicaState:
    return ReplicaState(report(replica_id, **stats), now_s, RATES)


def booking(name: str, tokens: int = 500, *, choices: int = 1, at_s: float = 0.0) -> Booking:
    request = RoutingRequest(request_id=name, model="m", num_prompt_tokens=tokens, max_tokens=10, num_choices=choices)
    return Booking(
        request=request,
        replica_id="r0",
        epoch=1,
        booked_s=at_s,
        num_uncached_tokens=tokens,
        num_context_tokens=tokens + 10,
        num_charged_tokens=10,
    )


def test_bookings_start_one_after_the_other_at_the_prefill_rate() -> None:
    replica = state(num_uncomputed_tokens=1_000)
    first, second = booking("a"), booking("b")
    replica.book(first, 0.0)
    replica.book(second, 0.2)
    assert (first.start_s, second.start_s) == pytest.approx((1.0, 1.5))
    assert replica.num_waiting(0.5) == 2
    assert replica.num_waiting(1.2) == 1
    assert replica.next_start_s(1.2) == pytest.approx(1.5)
    assert replica.num_waiting(1.6) == 0
    assert replica.wait_s(1.2) == pytest.approx(0.8)


def of_priority(priority: int, made: Booking) -> Booking:
    return replace(made, request=replace(made.request, priority=priority))


def test_urgent_booking_starts_before_less_urgent_work_and_does_not_wait_for_it() -> None:
    tiers = (TierLoad(0, num_running=1, num_uncomputed_tokens=200), TierLoad(5, num_waiting=2, num_uncomputed_tokens=800))
    replica = state(num_running=1, num_waiting=2, num_uncomputed_tokens=1_000, tiers=tiers)
    low, urgent, second = of_priority(5, booking("low")), booking("urgent"), booking("second")
    for one in (low, urgent, second):
        replica.book(one, 0.0)
    # 200 tokens go before the first urgent one, and that one's 500 before the second
    assert (low.start_s, urgent.start_s, second.start_s) == pytest.approx((1.0, 0.2, 0.7))
    assert replica.busy_until_s == pytest.approx(2.5)
    assert replica.num_waiting(0.0, priority=0) == 2
    assert replica.num_waiting(0.0, priority=5) == replica.num_waiting(0.0) == 5
    replica.apply_report(report(num_running=1, num_waiting=2, num_uncomputed_tokens=1_000, num_steps=1, tiers=tiers), 0.5, RATES)
    assert (urgent.start_s, second.start_s) == pytest.approx((0.7, 1.2)), "the report repeats 200 tokens of their tier"


def test_snapshot_tells_what_is_less_urgent_than_the_request() -> None:
    tiers = (TierLoad(0, 1, 2, 30, 400), TierLoad(5, 1, 1, 50, 600), TierLoad(9, 1, 0, 7, 80))
    replica = state(num_running=3, num_waiting=3, num_uncomputed_tokens=87, num_context_tokens=1_080, tiers=tiers)
    assert replica.snapshot(0.0, 0, 0, priority=9).behind is None
    assert replica.snapshot(0.0, 0, 0, priority=0).behind == LoadBehind(2, 1, 57, 680, 0, 0, 0)
    low = of_priority(7, booking("low"))
    replica.book(low, 0.0)
    assert replica.snapshot(0.0, 0, 0, priority=5).behind == LoadBehind(1, 0, 7, 80, 1, 500, 510)
    replica.release(low)
    assert replica.snapshot(0.0, 0, 0, priority=5).behind == LoadBehind(1, 0, 7, 80, 0, 0, 0)
    met = replica.snapshot(0.0, 0, 0, priority=0).without_behind
    assert (met.stats.num_running, met.stats.num_waiting, met.stats.num_uncomputed_tokens) == (1, 2, 30)


def test_report_moves_the_predicted_starts() -> None:
    replica = state()
    replica.book(booking("a", 1_000), 0.0)
    late = booking("b", 1_000)
    replica.book(late, 0.0)
    assert late.start_s == pytest.approx(1.0)
    replica.apply_report(report(num_running=1, num_uncomputed_tokens=3_000, num_steps=1), 0.5, RATES)
    assert late.start_s == pytest.approx(3.5)
    assert replica.num_unseen == 1


def test_reported_waiting_requests_are_taken_to_start_as_prefill_goes_on() -> None:
    replica = state(num_waiting=4, num_uncomputed_tokens=4_000)
    assert [replica.num_waiting(now_s) for now_s in (0.0, 1.5, 3.5, 4.5)] == [4, 3, 1, 0]


def test_full_slots_make_everything_beyond_them_wait() -> None:
    replica = state(num_running=3)
    for name in "abc":
        replica.book(booking(name, 1), 0.0)
    assert replica.num_waiting(10.0) == 2, "one slot for three"


def test_blocks_that_cannot_be_had_make_bookings_wait() -> None:
    replica = state(num_free_blocks=40)
    replica.book(booking("a", 500), 0.0)
    assert replica.num_waiting(0.0) == 0
    replica.book(booking("b", 500), 0.0)
    assert replica.num_waiting(0.0) >= 1


def test_release_of_a_seen_booking_frees_its_slot_before_the_next_report() -> None:
    replica = state(num_running=3)
    one = booking("a", 1)
    replica.book(one, 0.0)
    replica.apply_report(report(num_running=4, num_steps=1), 0.1, RATES)
    replica.book(booking("b", 1, at_s=0.2), 0.2)
    assert replica.num_waiting(1.0) == 1
    replica.release(one)
    assert replica.num_waiting(1.0) == 0
    assert replica.snapshot(1.0, 0, 0).stats.num_running == 3


def test_choices_are_seen_one_by_one() -> None:
    replica = state()
    replica.book(booking("a", 100, choices=3), 0.0)
    snapshot = replica.snapshot(0.0, 0, 0)
    assert (snapshot.num_booked_requests, snapshot.num_booked_prefill_tokens, snapshot.num_booked_context_tokens) == (3, 100, 110)
    replica.apply_report(report(num_running=1, num_steps=1), 0.1, RATES)
    snapshot = replica.snapshot(0.2, 0, 0)
    assert (snapshot.num_booked_requests, snapshot.num_booked_prefill_tokens) == (2, 100)
    replica.apply_report(report(num_running=3, num_steps=2), 0.2, RATES)
    snapshot = replica.snapshot(0.3, 0, 0)
    assert (snapshot.num_booked_requests, snapshot.num_booked_prefill_tokens, snapshot.num_booked_context_tokens) == (0, 0, 0)


def test_expire_drops_only_what_newer_reports_do_not_show() -> None:
    replica = state()
    lost = booking("lost", at_s=0.0)
    replica.book(lost, 0.0)
    assert replica.expire(100.0, 10.0) == []
    replica.apply_report(report(num_steps=1), 11.0, RATES)
    assert replica.expire(11.0, 10.0) == [lost]
    assert replica.num_unseen == 0


def test_expire_finds_the_overdue_behind_one_that_may_still_come() -> None:
    replica = state()
    late, lost = booking("late", at_s=0.0), booking("lost", at_s=1.0)
    replica.book(late, 0.0)
    replica.book(lost, 1.0)
    late.arrives_s = 60.0  # its pair still computes the prompt
    replica.apply_report(report(num_steps=1), 20.0, RATES)
    assert replica.expire(20.0, 10.0) == [lost]
    assert replica.num_unseen == 1


def test_recent_work_is_utilization_times_the_window_from_the_start_on() -> None:
    replica = state()
    last_s = int(2 * RECENT_WORK_S)
    for second in range(last_s + 1):
        replica.book(booking(str(second), 250), float(second))  # a quarter of each second
        if second in (60, 300, last_s):
            assert replica.recent_work_s(second) / RECENT_WORK_S == pytest.approx(0.25, rel=0.05)
    later_s = last_s + RECENT_WORK_S
    assert replica.recent_work_s(later_s) == pytest.approx(replica.recent_work_s(last_s) * exp(-1), rel=0.15)


def test_snapshot_with_a_match_is_its_own() -> None:
    replica = state()
    plain = replica.snapshot(0.0, 0, 0)
    assert replica.snapshot(0.05, 0, 0) is plain
    assert replica.snapshot(0.05, 3, 0) == plain._replace(num_cached_blocks=3, num_pending_blocks=3, report_age_s=0.05)
    assert replica.snapshot(0.5, 0, 0).report_age_s == 0.5


def test_preview_ranks_by_queue_and_prefix_and_ignores_what_all_share() -> None:
    states = [state(f"r{number}", num_uncomputed_tokens=1_000 * number) for number in range(6)]
    preview = CandidatePreview(states)
    everybody = {f"r{number}": 100 for number in range(6)}
    assert [found.replica_id for found in preview.best(2, 0.0, everybody, {})] == ["r0", "r1"]
    # 20 blocks more on r5 are 0.32 s of prefill, less than its 5 s of queue: but half of the places go by prefix
    assert [found.replica_id for found in preview.best(2, 0.0, everybody | {"r5": 120}, {})] == ["r0", "r5"]
    assert [found.replica_id for found in preview.best(2, 0.0, {}, {"r5": 20})] == ["r0", "r5"]
    assert [found.replica_id for found in preview.best(2, 0.0, {"r4": 5}, {"r5": 20})] == ["r0", "r5"]
    assert [found.replica_id for found in preview.best(4, 0.0, {"r4": 5}, {"r5": 20})] == ["r0", "r1", "r4", "r5"]
    assert [found.replica_id for found in preview.best(2, 0.0, {}, {}, frozenset({"r0"}))] == ["r1", "r2"]
    assert [found.replica_id for found in preview.best(2, 0.0, {"r0": 9}, {}, frozenset({"r0"}))] == ["r1", "r2"]
    states[0].book(booking("a", 9_000), 0.0)
    preview.update(states[0])
    assert [found.replica_id for found in preview.best(2, 0.0, {}, {})] == ["r1", "r2"]
