from __future__ import annotations

import json
from collections import Counter

import pytest

from replicas.stats import DraftStats, TierLoad
from router.config import PolicyName
from router.snapshot import Decision, Rejection
from tests.reachable import reachable
from tests.router_harness import RATE, keys_of, make_router, replicas_of, report, request, state_of


def test_submit_waits_for_a_replica_and_goes_when_one_reports() -> None:
    router = make_router()
    router.submit(request("q"), 0.0)
    assert router.step(0.0) == []
    router.apply_report(report(), 1.0)
    (decision,) = router.step(1.0)
    assert isinstance(decision, Decision)
    assert (decision.request_id, decision.replica_id) == ("q", "r0")
    assert router.step(1.0) == []
    assert router.explain("q") == [decision]


def test_submit_same_id_twice_while_it_waits_is_an_error() -> None:
    router = make_router()
    router.submit(request("q"), 0.0)
    for model in ("m", "other"):
        with pytest.raises(ValueError, match="request_id must be unique"):
            router.submit(request("q", model=model), 0.0)
    router.cancel("q", 0.0)
    assert router.num_waiting == 0


def test_submit_id_booked_for_another_model_ends_that_booking() -> None:
    router = make_router()
    router.apply_report(report("r0", model="m"), 0.0)
    router.submit(request("q", model="m"), 0.0)
    assert replicas_of(router.step(0.0)) == ["r0"]
    router.submit(request("q", model="other"), 0.0)
    assert state_of(router)["num_booked_requests"] == 0
    router.cancel("q", 0.0)
    assert router.num_waiting == 0


def test_models_have_queues_of_their_own() -> None:
    router = make_router()
    router.apply_report(report("r0", model="m"), 0.0)
    router.apply_report(report("r1", model="other"), 0.0)
    for number in range(2):
        router.submit(request(f"m{number}"), 0.0)
        router.submit(request(f"o{number}", model="other"), 0.0)
    assert {answer.request_id[0]: answer.replica_id for answer in router.step(0.0) if isinstance(answer, Decision)} == {
        "m": "r0",
        "o": "r1",
    }
    assert set(router.models) == {"m", "other"}


@pytest.mark.parametrize("policy", ["scoring", "least_loaded", "round_robin", "longest_prefix"])
@pytest.mark.parametrize("num_replicas", [4, 8])
def test_burst_in_one_millisecond_spreads_by_bookings(policy: PolicyName, num_replicas: int) -> None:
    router = make_router(policy, dispatch_ahead=None)
    shared = keys_of(0, length=1)
    for number in range(num_replicas):
        router.apply_report(report(f"r{number}", keys=shared if number == 0 else ()), 0.0)
    for number in range(64):
        router.submit(request(f"q{number}", keys=keys_of(0, number + 1, length=10)), number * 1e-3 / 64)
    sent = Counter(replicas_of(router.step(1e-3)))
    assert sum(sent.values()) == 64
    assert max(sent.values()) <= 1.5 * 64 / num_replicas


@pytest.mark.parametrize("policy", ["scoring", "longest_prefix"])
def test_prefix_that_everybody_shares_does_not_draw_all_to_one_replica(policy: PolicyName) -> None:
    router = make_router(policy)
    system_prompt = keys_of(0, length=1)
    for number in range(4):
        router.apply_report(report(f"r{number}", keys=system_prompt if number == 2 else ()), 0.0)
    sent: Counter[str] = Counter()
    for number in range(200):
        now_s = number * 0.2  # each takes 0.16 s of prefill, so a single replica could just keep up
        router.submit(request(f"q{number}", keys=keys_of(0, number + 1, length=10)), now_s)
        for replica_id in replicas_of(router.step(now_s)):
            sent[replica_id] += 1
            router.release(f"q{number}", now_s + 0.19, 10)
    assert sum(sent.values()) == 200
    assert max(sent.values()) <= 1.5 * 50


def test_cached_prefix_draws_and_yields_when_the_wait_costs_more() -> None:
    router = make_router(dispatch_ahead=None)
    conversation = keys_of(7, length=100)
    router.apply_report(report("r0", keys=conversation), 0.0)
    router.apply_report(report("r1"), 0.0)
    router.submit(request("turn", tokens=1_616, keys=keys_of(*[7] * 100, 8, length=101)), 0.0)
    (decision,) = router.step(0.0)
    assert isinstance(decision, Decision)
    assert (decision.replica_id, decision.num_cached_tokens) == ("r0", 1_600)
    assert decision.predicted_ttft_s == pytest.approx(16 / RATE + 0.01)
    # now 10 s of prefill wait there: computing 1.6 s of prompt anew elsewhere is sooner done
    router.apply_report(report("r0", first_event=100, num_uncomputed_tokens=10_000, num_waiting=3, num_steps=1), 0.1)
    router.submit(request("again", tokens=1_616, keys=keys_of(*[7] * 100, 9, length=101)), 0.1)
    assert replicas_of(router.step(0.1)) == ["r1"]


def test_prefix_on_its_way_draws_before_it_is_reported_but_is_no_saving_yet() -> None:
    router = make_router(dispatch_ahead=None)
    for number in range(3):
        router.apply_report(report(f"r{number}"), 0.0)
    first, second = keys_of(7, 1, length=200), keys_of(7, 1, 1, 2, length=200)
    router.submit(request("first", tokens=3_200, keys=first), 0.0)
    router.submit(request("other", tokens=160), 0.0)
    router.submit(request("second", tokens=3_200, keys=first), 0.0)
    decisions = {answer.request_id: answer for answer in router.step(0.0) if isinstance(answer, Decision)}
    assert decisions["other"].replica_id != decisions["first"].replica_id
    assert decisions["second"].num_cached_tokens == 0
    terms = {score.replica_id: dict(score.terms) for score in decisions["second"].candidates}
    assert terms[decisions["first"].replica_id]["pending"] < -2.0
    assert second[:3] == first[:3]


def test_dispatch_ahead_keeps_the_rest_here_and_the_urgent_one_passes() -> None:
    router = make_router(dispatch_ahead=2)
    router.apply_report(report(), 0.0)
    for number in range(10):
        router.submit(request(f"flood{number}", tokens=1_000, priority=5), 0.0)
    # the first starts at once, two more wait inside
    assert len(router.step(0.0)) == 3
    wakeup_s = router.next_wakeup_s(0.0)
    assert wakeup_s == pytest.approx(1.0)
    for number in range(5):
        router.submit(request(f"urgent{number}", tokens=1_000), 0.1)
    # the flood does not stand in their way, but they stand in each other's
    answers = router.step(0.1)
    assert [answer.request_id for answer in answers] == ["urgent0", "urgent1", "urgent2"]
    predicted = [answer.predicted_ttft_s for answer in answers if isinstance(answer, Decision)]
    assert predicted == pytest.approx([1.01, 2.01, 3.01]), "1,000 tokens a second, and a decode step"
    router.submit(request("late", tokens=1_000, priority=5), 0.2)
    assert router.step(0.2) == []
    assert [answer.request_id for answer in router.step(1.2)] == ["urgent3"]


def test_urgent_request_has_no_privilege_where_requests_are_ordered_by_arrival() -> None:
    router = make_router(dispatch_ahead=2, orders=("fcfs",))
    router.apply_report(report(), 0.0)
    for number in range(4):
        router.submit(request(f"q{number}", tokens=1_000, priority=5), 0.0)
    assert len(router.step(0.0)) == 3
    router.submit(request("urgent", tokens=1_000), 0.1)
    assert router.step(0.1) == []


def test_urgent_request_goes_to_a_replica_whose_slots_less_urgent_ones_hold() -> None:
    """64 of 64 slots, and two requests wait inside: for the urgent one there is room, because it takes a slot."""
    router = make_router(dispatch_ahead=2)
    tiers = (TierLoad(5, num_running=64, num_waiting=2, num_uncomputed_tokens=400, num_context_tokens=6_400),)
    stats = {"num_running": 64, "num_waiting": 2, "num_uncomputed_tokens": 400, "num_context_tokens": 6_400}
    router.apply_report(report(tiers=tiers, **stats), 0.0)
    router.submit(request("equal", priority=5), 0.0)
    assert router.step(0.0) == []
    router.submit(request("urgent"), 0.1)
    (decision,) = router.step(0.1)
    assert (decision.request_id, decision.predicted_ttft_s) == ("urgent", pytest.approx(0.16 + 0.01))  # type: ignore[union-attr]


def test_full_replicas_take_the_queue_on_when_one_of_them_has_room() -> None:
    router = make_router(dispatch_ahead=1)
    for number in range(3):
        router.apply_report(report(f"r{number}", num_uncomputed_tokens=50_000, num_waiting=2, num_running=1, num_steps=1), 0.0)
    router.submit(request("q"), 0.0)
    assert router.step(0.0) == []
    wakeup_s = router.next_wakeup_s(0.0)
    assert wakeup_s is not None
    # a report of one that is still full changes nothing, and does not put the next look off
    router.apply_report(report("r1", num_uncomputed_tokens=49_000, num_waiting=2, num_running=1, num_steps=2), 0.1)
    assert router.step(0.1) == []
    assert router.next_wakeup_s(0.1) == wakeup_s
    router.apply_report(report("r2", num_running=1, num_steps=2), 0.2)
    assert replicas_of(router.step(0.2)) == ["r2"]


def test_held_request_does_not_block_others_that_fit_elsewhere() -> None:
    router = make_router(dispatch_ahead=1)
    conversation = keys_of(7, length=500)
    router.apply_report(report("r0", keys=conversation, num_uncomputed_tokens=2_000, num_waiting=1), 0.0)
    router.apply_report(report("r1"), 0.0)
    router.submit(request("loyal", tokens=8_000, keys=conversation), 0.0)
    router.submit(request("cold", tokens=160), 0.0)
    assert [(answer.request_id, answer.replica_id) for answer in router.step(0.0) if isinstance(answer, Decision)] == [("cold", "r1")]
    router.apply_report(report("r0", first_event=500, num_running=1, num_steps=1), 2.0)
    assert replicas_of(router.step(2.0)) == ["r0"]


def test_view_of_a_replica_shows_what_its_drafts_gave() -> None:
    router = make_router()
    drafts = (DraftStats(method="suffix", num_passes=4, num_drafted=12, num_accepted=6), DraftStats(method="ngram"))
    router.apply_report(report(drafts=drafts, speculation_gain=1.25), 0.0)
    assert (state_of(router)["tokens_per_pass"], state_of(router)["speculation_gain"]) == ({"suffix": 2.5}, 1.25)


def test_cancel_waiting_request_gets_no_answer() -> None:
    router = make_router()
    router.submit(request("gone"), 0.0)
    router.cancel("gone", 0.0)
    router.cancel("never seen", 0.0)
    router.apply_report(report(), 0.0)
    assert router.step(0.0) == []
    assert router.num_waiting == 0


def test_resend_avoids_the_replica_that_failed_it() -> None:
    router = make_router()
    keys = keys_of(7, length=100)
    router.apply_report(report("r0", keys=keys), 0.0)
    router.apply_report(report("r1"), 0.0)
    router.submit(request("q", tokens=1_600, keys=keys), 0.0)
    assert replicas_of(router.step(0.0)) == ["r0"]
    router.submit(request("q", tokens=1_600, keys=keys, attempt=1, excluded=frozenset({"r0"})), 0.5)
    assert replicas_of(router.step(0.5)) == ["r1"]
    assert state_of(router, "r0")["num_booked_requests"] == 0
    router.remove_replica("r1", 1.0)
    router.submit(request("q", tokens=1_600, keys=keys, attempt=2, excluded=frozenset({"r0"})), 1.0)
    assert replicas_of(router.step(1.0)) == ["r0"], "the only replica left is better than none"


def test_draining_replica_gets_nothing_new() -> None:
    router = make_router()
    router.apply_report(report("r0", is_draining=True), 0.0)
    router.submit(request("q"), 0.0)
    assert router.step(0.0) == []
    router.apply_report(report("r1"), 0.0)
    assert replicas_of(router.step(0.0)) == ["r1"]


def test_silent_replica_gets_work_only_when_all_are_silent() -> None:
    router = make_router(report_timeout_s=5.0)
    router.apply_report(report("r0"), 0.0)
    router.apply_report(report("r1"), 8.0)
    for number in range(3):
        router.submit(request(f"q{number}", tokens=1), 10.0)
    assert replicas_of(router.step(10.0)) == ["r1"] * 3
    router.submit(request("later"), 100.0)
    assert len(router.step(100.0)) == 1, "stale reports do not stop dispatch"


def test_describe_is_plain_json() -> None:
    router = make_router()
    router.apply_report(report(), 0.0)
    router.submit(request("q"), 0.0)
    router.step(0.0)
    assert json.loads(json.dumps(router.describe(1.0)))["m"]["num_decisions"] == 1


def test_router_keeps_nothing_of_requests_that_ended() -> None:
    router = make_router(num_explained=4)
    router.apply_report(report(), 0.0)
    for number in range(2_500):
        router.submit(request(f"q{number}", keys=keys_of(number, length=9), tenant=f"t{number % 7}"), number)
        router.step(number)
        router.release(f"q{number}", number + 0.5, 5)
        router.apply_report(report(num_finished=number + 1, num_steps=number + 1), number + 0.9)
    assert len(reachable(router)) < 1_500, "more than one object for each two requests is kept"
    assert [number for number in range(2_500) if router.explain(f"q{number}")] == [2_496, 2_497, 2_498, 2_499]


def test_explain_of_an_answer_tells_of_its_prompts_and_resends_only() -> None:
    router = make_router(no_replica_timeout_s=1.0)
    router.submit(request("lost-0"), 0.0)
    (rejection,) = router.step(2.0)
    router.apply_report(report(), 3.0)
    for name in ("cmpl-a-0", "cmpl-a-1", "cmpl-a-0-0-1", "cmpl-ab-0"):
        router.submit(request(name), 3.0)
        router.step(3.0)
        router.release(name, 3.0)
    assert router.explain("lost") == [rejection]
    assert [answer.request_id for answer in router.explain("cmpl-a")] == ["cmpl-a-0", "cmpl-a-1", "cmpl-a-0-0-1"]
    for other in ("nobody", "", "cmpl", "cmpl-", "cmpl-a-", "cmpl-a-0-0-1-", "CMPL-a"):
        assert router.explain(other) == []


def test_fenced_replica_gets_nothing_until_the_fence_is_lifted() -> None:
    router = make_router()
    router.apply_report(report("r0"), 0.0)
    router.apply_report(report("r1"), 0.0)
    router.set_fenced(frozenset({"r0"}))
    for index in range(6):
        router.submit(request(f"a{index}"), 0.0)
    assert replicas_of(router.step(0.0)) == ["r1"] * 3  # one that starts and dispatch_ahead; the others wait rather than go to r0
    router.set_fenced(frozenset())
    assert "r0" in replicas_of(router.step(0.3))


def test_fence_of_a_model_known_later_holds() -> None:
    router = make_router()
    router.set_fenced(frozenset({"r0"}))
    router.apply_report(report("r0"), 0.0)
    router.submit(request("a"), 0.0)
    assert router.step(0.0) == []
    assert state_of(router)["is_fenced"]


def test_requests_of_a_caller_are_those_it_waits_for_or_has_booked() -> None:
    router = make_router(dispatch_ahead=1)
    router.apply_report(report(), 0.0)
    for name, caller in (("a", "g1"), ("b", "g1"), ("c", "g2")):
        router.submit(request(name, caller=caller), 0.0)
    router.step(0.0)
    router.submit(request("d", caller="g1", is_alone=True), 0.0)
    assert sorted(router.requests_of("g1")) == ["a", "b", "d"]
    assert router.requests_of("g2") == ["c"]
    for name in router.requests_of("g1"):
        router.cancel(name, 0.0)
    assert router.requests_of("g1") == []


def test_request_for_a_model_that_is_not_served_is_rejected_at_once() -> None:
    """Though replicas of it still drain: the router of a new configuration hears them."""
    router = make_router(served=frozenset({"m"}))
    router.apply_report(report("r1", model="old", is_draining=True), 0.0)
    router.submit(request("a", model="old", attempt=1), 0.0)
    assert router.next_wakeup_s(0.0) == 0.0
    (rejection,) = router.step(0.0)
    assert isinstance(rejection, Rejection)
    assert (rejection.request_id, rejection.kind, rejection.is_unavailable) == ("a", "not_served", True)
    assert router.explain("a") == [rejection]
    assert router.step(0.0) == []
    assert router.statistics()["old"].num_rejections == {"not_served": 1}
    assert "m" not in router.statistics()
    router.remove_replica("r1", 1.0)
    assert router.statistics()["old"].num_rejections == {"not_served": 1}, "a counter never goes back"


def test_model_that_is_not_served_is_forgotten_with_its_last_replica() -> None:
    router = make_router(served=frozenset({"m"}))
    for name, model in (("r0", "m"), ("r1", "old"), ("r2", "old")):
        router.apply_report(report(name, model=model, is_draining=model == "old"), 0.0)
    router.remove_replica("r1", 1.0)
    assert set(router.describe(1.0)) == {"m", "old"}
    router.remove_replica("r2", 1.0)
    router.remove_replica("r0", 1.0)
    assert set(router.describe(1.0)) == set(router.statistics()) == {"m"}


def test_serving_replicas_neither_drain_nor_hang() -> None:
    router = make_router()
    assert router.num_serving() == {}
    for name in ("r0", "r1", "r2"):
        router.apply_report(report(name), 0.0)
    router.submit(request("a", is_alone=True), 0.0)
    router.step(0.0)
    assert router.num_serving() == {"m": 3}, "one that is reserved for a request serves"
    router.set_fenced(frozenset({"r0"}))
    router.apply_report(report("r1", first_event=0, is_draining=True), 0.1)
    assert router.num_serving() == {"m": 1}
    router.remove_replica("r2", 1.0)
    assert router.num_serving() == {"m": 0}
