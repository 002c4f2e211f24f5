from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.events import BlockStored
from kvcache.hashing import CacheIdentity, block_keys
from replicas.stats import ReplicaReport, ReplicaStats
from router.config import PolicyName, RouterConfig
from router.policy_choice import make_policy
from router.router import Router
from router.snapshot import Decision, Rejection, RoutingRequest

BLOCK = 16
RATE = 1_000.0  # prompt tokens a second of every replica here
POLICIES: tuple[PolicyName, ...] = ("scoring", "least_loaded", "round_robin", "power_of_two", "longest_prefix", "consistent_hash")


def make_router(policy: PolicyName = "scoring", **fields: object) -> Router:
    config = RouterConfig(policy=policy, **fields)  # type: ignore[arg-type]
    return Router(config, make_policy(config))


def report(
    replica_id: str = "r0",
    *,
    epoch: int = 1,
    first_event: int = 0,
    keys: tuple[bytes, ...] = (),
    is_draining: bool = False,
    model: str = "m",
    **stats: float,
) -> ReplicaReport:
    root = CacheIdentity().root_key()
    fields = {"num_blocks": 10_000, "num_free_blocks": 10_000, "prefill_tokens_per_s": RATE, "decode_step_s": 0.01} | stats
    return ReplicaReport(
        replica_id=replica_id,
        model=model,
        epoch=epoch,
        stats=ReplicaStats(**fields),  # type: ignore[arg-type]
        block_size=BLOCK,
        max_num_seqs=64,
        first_event=first_event,
        events=tuple(BlockStored(key, parent) for parent, key in zip((root, *keys), keys, strict=False)),
        is_draining=is_draining,
    )


def keys_of(*tokens: int, length: int) -> tuple[bytes, ...]:
    """Block keys of a prompt of `length` blocks: the given blocks' tokens, then the last of them for ever."""
    blocks = [*tokens, *[tokens[-1]] * (length - len(tokens))]
    return tuple(block_keys(CacheIdentity(), [token for token in blocks for _ in range(BLOCK)], BLOCK))


def request(
    request_id: str,
    *,
    tokens: int = 160,
    keys: tuple[bytes, ...] = (),
    priority: int = 0,
    tenant: str = "a",
    model: str = "m",
    num_choices: int = 1,
    attempt: int = 0,
    excluded: frozenset[str] = frozenset(),
    is_alone: bool = False,
    caller: str = "",
    arrival_s: float = 0.0,
) -> RoutingRequest:
    return RoutingRequest(
        request_id=request_id,
        model=model,
        num_prompt_tokens=tokens,
        max_tokens=64,
        block_keys=keys,
        priority=priority,
        tenant=tenant,
        num_choices=num_choices,
        attempt=attempt,
        excluded_replicas=excluded,
        is_alone=is_alone,
        arrival_s=arrival_s,
        caller=caller,
    )


def replicas_of(answers: list[Decision | Rejection]) -> list[str]:
    return [answer.replica_id for answer in answers if isinstance(answer, Decision)]


def state_of(router: Router, replica_id: str = "r0", now_s: float = 0.0) -> dict[str, object]:
    model = router.describe(now_s)["m"]
    assert isinstance(model, dict)
    state: dict[str, object] = model["replicas"][replica_id]
    return state


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


def test_submit_without_any_replica_is_rejected_as_unavailable_in_time() -> None:
    router = make_router(no_replica_timeout_s=10.0)
    router.submit(request("q"), 5.0)
    assert router.next_wakeup_s(5.0) == 15.0
    assert router.step(14.9) == []
    (rejection,) = router.step(15.0)
    assert isinstance(rejection, Rejection)
    assert rejection.is_unavailable
    assert rejection.retry_after_s > 0
    assert router.num_waiting == 0


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
    router.submit(request("urgent", tokens=1_000), 0.1)
    assert router.step(0.1) == []
    wakeup_s = router.next_wakeup_s(0.1)
    assert wakeup_s == pytest.approx(1.0)
    assert [answer.request_id for answer in router.step(1.0)] == ["urgent"]


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


def test_booking_counts_until_a_report_shows_it() -> None:
    router = make_router()
    router.apply_report(report(), 0.0)
    router.submit(request("a", tokens=500), 0.0)
    router.submit(request("b", tokens=500, num_choices=2), 0.0)
    router.step(0.0)
    assert (state_of(router)["num_booked_requests"], state_of(router)["num_booked_prefill_tokens"]) == (3, 1_000)
    router.apply_report(report(num_running=2, num_steps=1), 0.1)
    assert (state_of(router)["num_booked_requests"], state_of(router)["num_booked_prefill_tokens"]) == (1, 500)
    router.apply_report(report(num_running=2, num_finished=1, num_steps=2), 0.2)
    assert (state_of(router)["num_booked_requests"], state_of(router)["num_booked_prefill_tokens"]) == (0, 0)
    router.apply_report(report(num_running=2, num_steps=1), 0.3)  # an old report, late
    assert state_of(router)["num_booked_requests"] == 0


def test_booking_that_no_report_shows_expires() -> None:
    router = make_router(booking_expiry_s=5.0)
    router.apply_report(report(), 0.0)
    router.submit(request("lost"), 0.0)
    router.step(0.0)
    router.step(4.0)
    assert state_of(router)["num_booked_requests"] == 1
    router.step(6.0)
    assert state_of(router)["num_booked_requests"] == 1, "without a report since then nothing is known"
    router.apply_report(report(num_steps=1), 6.0)
    router.step(6.6)
    assert state_of(router)["num_booked_requests"] == 0


def test_booking_that_nobody_releases_ends_with_its_lease() -> None:
    router = make_router(lease_s=60.0)
    router.apply_report(report(), 0.0)
    router.submit(request("q"), 0.0)
    router.step(0.0)
    router.step(61.0)
    model = router.describe(61.0)["m"]
    assert isinstance(model, dict)
    assert model["num_bookings"] == 0


def test_release_before_any_report_takes_the_load_away() -> None:
    router = make_router()
    router.apply_report(report(), 0.0)
    router.submit(request("quick"), 0.0)
    router.step(0.0)
    router.release("quick", 0.01, 3)
    assert state_of(router)["num_booked_requests"] == 0
    router.submit(request("next"), 0.02)
    router.step(0.02)
    router.apply_report(report(num_finished=1, num_steps=3), 0.03)  # it shows the first, not the second
    assert state_of(router)["num_booked_requests"] == 1
    router.apply_report(report(num_finished=1, num_running=1, num_steps=4), 0.04)
    assert state_of(router)["num_booked_requests"] == 0


def test_cancel_waiting_request_gets_no_answer() -> None:
    router = make_router()
    router.submit(request("gone"), 0.0)
    router.cancel("gone", 0.0)
    router.cancel("never seen", 0.0)
    router.apply_report(report(), 0.0)
    assert router.step(0.0) == []
    assert router.num_waiting == 0


def test_cancel_dispatched_request_ends_its_booking() -> None:
    router = make_router()
    router.apply_report(report(), 0.0)
    router.submit(request("q"), 0.0)
    router.step(0.0)
    router.cancel("q", 0.1)
    assert state_of(router)["num_booked_requests"] == 0


def test_remove_replica_and_new_epoch_drop_bookings_and_cache() -> None:
    router = make_router()
    keys = keys_of(7, length=10)
    router.apply_report(report(keys=keys), 0.0)
    router.submit(request("q", keys=keys), 0.0)
    router.step(0.0)
    router.apply_report(report(epoch=2), 1.0)
    assert (state_of(router)["num_booked_requests"], state_of(router)["num_cached_blocks"]) == (0, 0)
    assert not router.apply_report(report(epoch=1, keys=keys), 1.1).resync
    assert state_of(router)["num_cached_blocks"] == 0
    router.remove_replica("r0", 2.0)
    router.submit(request("q2"), 2.0)
    assert router.step(2.0) == []


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


def test_queue_limit_gives_up_the_lowest_class_first() -> None:
    router = make_router(max_queue_requests=2)
    for name, priority in (("a", 1), ("b", 2), ("c", 0), ("d", 2)):
        router.submit(request(name, priority=priority), 0.0)
    rejections = router.step(0.0)
    assert [answer.request_id for answer in rejections] == ["b", "d"]
    assert all(isinstance(answer, Rejection) and answer.retry_after_s >= 1 for answer in rejections)
    assert router.num_waiting == 2


def test_tenant_limit_rejects_only_that_tenant() -> None:
    router = make_router(max_queue_requests_per_tenant=1)
    for name, tenant in (("a0", "a"), ("a1", "a"), ("b0", "b")):
        router.submit(request(name, tenant=tenant), 0.0)
    (rejection,) = router.step(0.0)
    assert rejection.request_id == "a1"


def test_predicted_wait_sheds_by_class_and_tells_when_to_come_back() -> None:
    router = make_router(max_wait_s=5.0, max_wait_s_by_priority={0: 60.0}, dispatch_ahead=1)
    router.apply_report(report(), 0.0)
    for number in range(8):
        router.submit(request(f"q{number}", tokens=1_000, priority=1), 0.0)
    # the queue was empty until a step; with six seconds of prompts ahead the seventh of class 1 is too many
    rejected = [answer for answer in router.step(0.0) if isinstance(answer, Rejection)]
    assert [answer.request_id for answer in rejected] == ["q6", "q7"]
    assert all(answer.retry_after_s == pytest.approx(1.0) for answer in rejected)
    router.submit(request("urgent", tokens=1_000), 0.0)
    assert not any(isinstance(answer, Rejection) for answer in router.step(0.0))


def test_describe_is_plain_json() -> None:
    router = make_router()
    router.apply_report(report(), 0.0)
    router.submit(request("q"), 0.0)
    router.step(0.0)
    assert json.loads(json.dumps(router.describe(1.0)))["m"]["num_decisions"] == 1


def test_router_keeps_nothing_of_requests_that_ended() -> None:
    router = make_router(num_explained=4)
    router.apply_report(report(), 0.0)
    for number in range(500):
        router.submit(request(f"q{number}", keys=keys_of(number, length=9), tenant=f"t{number % 7}"), number)
        router.step(number)
        router.release(f"q{number}", number + 0.5, 5)
        router.apply_report(report(num_finished=number + 1, num_steps=number + 1), number + 0.9)
    assert not router._model_of_request
    assert len(router._explained) == 4
    model = router._models["m"]
    assert model._pending.num_entries == 0
    assert not model._pending_on
    assert not model._bookings


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "submit", "report", "report", "release", "cancel", "remove", "restart", "wait"]),
        st.integers(0, 3),
        st.integers(0, 20),
    ),
    max_size=80,
)


def act(router: Router, action: str, number: int, value: int, submitted: list[str], epoch: int, num_steps: int, now_s: float) -> None:
    if action == "submit":
        keys = keys_of(number, value, length=value + 1)
        name = f"q{len(submitted)}"
        router.submit(request(name, tokens=16 * (value + 1), keys=keys, priority=number, tenant=f"t{value % 3}"), now_s)
    elif action == "report":
        router.apply_report(report(f"r{number}", epoch=epoch, num_finished=num_steps, num_steps=num_steps), now_s)
    elif action == "restart":
        router.apply_report(report(f"r{number}", epoch=epoch + 1), now_s)
    elif action == "remove":
        router.remove_replica(f"r{number}", now_s)
    elif action == "release" and submitted:
        router.release(submitted[value % len(submitted)], now_s, value)
    elif action == "cancel" and submitted:
        router.cancel(submitted[value % len(submitted)], now_s)


def drain(router: Router, now_s: float) -> list[str]:
    """Ids of the answers until nothing waits, with each request ending as soon as it is dispatched."""
    answered = []
    for _ in range(5_000):
        for answer in router.step(now_s):
            answered.append(answer.request_id)
            router.release(answer.request_id, now_s, 1)
        if not router.num_waiting:
            break
        wakeup_s = router.next_wakeup_s(now_s)
        assert wakeup_s is not None
        now_s = max(now_s + 1e-3, wakeup_s)
    return answered


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(POLICIES), ACTIONS)
def test_router_answers_each_request_once_and_the_same_each_time(policy: PolicyName, actions: list[tuple[str, int, int]]) -> None:
    routers = [make_router(policy, max_queue_requests=12, dispatch_ahead=2, no_replica_timeout_s=50.0) for _ in range(2)]
    submitted: list[str] = []
    cancelled: set[str] = set()
    answered: Counter[str] = Counter()
    epochs = [1] * 4
    now_s = 0.0
    for num_steps, (action, number, value) in enumerate(actions):
        now_s += value if action == "wait" else 0.01
        both = []
        for router in routers:
            act(router, action, number, value, submitted, epochs[number], num_steps, now_s)
            both.append(router.step(now_s))
        assert both[0] == both[1]
        answered.update(answer.request_id for answer in both[0])
        if action == "submit":
            submitted.append(f"q{len(submitted)}")
        elif action == "cancel" and submitted:
            cancelled.add(submitted[value % len(submitted)])
        elif action == "restart":
            epochs[number] += 1
    routers[0].apply_report(report("last"), now_s)
    answered.update(drain(routers[0], now_s))
    assert routers[0].num_waiting == 0
    assert all(count == 1 for count in answered.values())
    assert set(answered) | cancelled == set(submitted)


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
    assert router.explain("nobody") == []


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


def test_solitary_request_waits_for_an_empty_replica_and_keeps_others_off_it() -> None:
    router = make_router()
    router.apply_report(report("r0", num_running=3), 0.0)
    router.apply_report(report("r1", num_running=1), 0.0)
    router.submit(request("alone", is_alone=True), 0.0)
    assert router.step(0.0) == []  # r1 is reserved, and not empty yet
    for index in range(3):
        router.submit(request(f"a{index}"), 0.0)
    assert replicas_of(router.step(0.0)) == ["r0"] * 3
    router.apply_report(report("r1", num_running=0, num_finished=1, num_steps=1), 0.1)
    decisions = router.step(0.1)
    assert [(d.request_id, d.replica_id) for d in decisions if isinstance(d, Decision)] == [("alone", "r1")]
    router.submit(request("late"), 0.1)
    assert router.step(0.1) == []  # r1 stays reserved while it runs there
    router.release("alone", 0.2, 5)
    assert "r1" in replicas_of(router.step(0.2))


def test_solitary_request_whose_reserved_replica_dies_takes_another() -> None:
    router = make_router()
    router.apply_report(report("r0", num_running=2), 0.0)
    router.apply_report(report("r1", num_running=1), 0.0)
    router.submit(request("alone", is_alone=True), 0.0)
    router.step(0.0)
    router.remove_replica("r1", 0.0)
    router.apply_report(report("r0", num_running=0, num_finished=2, num_steps=1), 0.1)
    assert replicas_of(router.step(0.1)) == ["r0"]


def test_solitary_requests_run_one_after_the_other_on_a_single_replica() -> None:
    router = make_router()
    router.apply_report(report(), 0.0)
    router.submit(request("x", is_alone=True), 0.0)
    router.submit(request("y", is_alone=True), 0.0)
    assert replicas_of(router.step(0.0)) == ["r0"]
    assert router.step(1.0) == []
    router.apply_report(report(num_running=0, num_finished=1, num_steps=1), 1.0)
    router.release("x", 1.0, 5)
    (decision,) = router.step(1.0)
    assert decision.request_id == "y"


def test_solitary_request_that_is_cancelled_frees_its_replica() -> None:
    router = make_router()
    router.apply_report(report(num_running=1), 0.0)
    router.submit(request("alone", is_alone=True), 0.0)
    router.step(0.0)
    router.submit(request("a"), 0.0)
    assert router.step(0.0) == []
    router.cancel("alone", 0.0)
    assert replicas_of(router.step(0.0)) == ["r0"]
    assert router.num_waiting == 0


def test_solitary_request_without_any_replica_is_rejected_in_time() -> None:
    router = make_router(no_replica_timeout_s=10.0)
    router.submit(request("alone", is_alone=True), 0.0)
    assert router.step(9.0) == []
    (rejection,) = router.step(10.0)
    assert isinstance(rejection, Rejection)
    assert rejection.is_unavailable


def test_resend_is_admitted_to_a_full_queue_and_goes_before_newer_requests() -> None:
    router = make_router(dispatch_ahead=1, max_queue_requests=2)
    router.apply_report(report(), 100.0)
    for name in ("a", "b", "c", "d"):  # the first two are dispatched
        router.submit(request(name, arrival_s=100.0), 100.0)
        router.step(100.0)
    router.submit(request("late", arrival_s=100.0), 100.0)
    router.submit(request("resend", attempt=1, arrival_s=40.0), 100.0)
    assert [answer.request_id for answer in router.step(100.0)] == ["late"]  # turned away
    router.release("a", 100.1)
    router.release("b", 100.1)
    assert router.step(100.1)[0].request_id == "resend"
