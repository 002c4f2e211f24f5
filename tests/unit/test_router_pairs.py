"""Prefill and decode pools in the router: what is decided together is booked together, and ends on each side for itself."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.engine_config import Role
from replicas.stats import ReplicaReport
from router.config import PolicyName
from router.explanation import explanation
from router.router import Router
from router.snapshot import Decision
from tests.router_harness import POLICIES, keys_of, make_router, report, request, state_of

ROLES: dict[str, Role] = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}


def pool_report(replica_id: str, **fields: object) -> ReplicaReport:
    stats = {"transfer_tokens_per_s": 1e6} | fields
    return report(replica_id, role=ROLES[replica_id], **stats)  # type: ignore[arg-type]


def make_pools(policy: PolicyName = "scoring", replica_ids: tuple[str, ...] = tuple(ROLES), **fields: object) -> Router:
    router = make_router(policy, **fields)
    for replica_id in replica_ids:
        router.apply_report(pool_report(replica_id, num_running=20 if ROLES[replica_id] == "decode" else 0), 0.0)
    return router


def decide(router: Router, name: str, now_s: float = 0.0, **fields: object) -> Decision:
    """The answer to a request that is long and cached nowhere, unless `fields` say otherwise."""
    router.submit(request(name, **({"tokens": 1_600} | fields)), now_s)  # type: ignore[arg-type]
    (decision,) = router.step(now_s)
    assert isinstance(decision, Decision)
    return decision


def plan(decision: Decision) -> tuple[str | None, str]:
    return decision.prefill_replica_id and decision.prefill_replica_id[0], decision.replica_id[0]


def booked(router: Router, replica_id: str) -> tuple[object, object]:
    """Requests and prefill tokens booked on the replica."""
    state = state_of(router, replica_id)
    return state["num_booked_requests"], state["num_booked_prefill_tokens"]


@pytest.mark.parametrize("policy", POLICIES)
def test_long_prompt_goes_to_a_pair_that_is_booked_on_both_sides(policy: PolicyName) -> None:
    router = make_pools(policy, ("p0", "d0"))
    decision = decide(router, "q")
    assert (decision.prefill_replica_id, decision.replica_id, decision.replica_role) == ("p0", "d0", "decode")
    assert decision.predicted_ttft_s == pytest.approx(1.6)
    assert (booked(router, "p0"), booked(router, "d0")) == ((1, 1_600), (1, 0))
    router.release_prefill("q", 1.7)
    router.release_prefill("q", 1.7)
    assert (booked(router, "p0"), booked(router, "d0")) == ((0, 0), (1, 0))
    router.release("q", 3.0, 64)
    assert (booked(router, "p0"), booked(router, "d0")) == ((0, 0), (0, 0))


def test_release_ends_both_bookings_of_a_pair() -> None:
    router = make_pools(replica_ids=("p0", "d0"))
    decide(router, "q")
    router.release("q", 0.1)
    assert (booked(router, "p0"), booked(router, "d0")) == ((0, 0), (0, 0))


def test_resend_ends_both_bookings_of_the_older_attempt() -> None:
    router = make_pools(replica_ids=("p0", "d0", "d1"))
    first = decide(router, "q")
    again = decide(router, "q", 0.5, attempt=1, excluded=frozenset({first.replica_id}))
    assert plan(again) == ("p", "d")
    assert again.replica_id != first.replica_id
    assert (booked(router, "p0"), booked(router, first.replica_id), booked(router, again.replica_id)) == ((1, 1_600), (0, 0), (1, 0))


@pytest.mark.parametrize("dying", ["p0", "d0"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_death_of_one_side_leaves_the_other_booked_until_it_is_released(dying: str, is_restarted: bool) -> None:
    router = make_pools(replica_ids=("p0", "d0"))
    decide(router, "q")
    if is_restarted:
        router.apply_report(pool_report(dying, epoch=2), 0.5)
        assert booked(router, dying) == (0, 0)
    else:
        router.remove_replica(dying, 0.5)
    left, prefill_tokens = ("d0", 0) if dying == "p0" else ("p0", 1_600)
    assert booked(router, left) == (1, prefill_tokens)
    router.release_prefill("q", 0.6)
    assert booked(router, left) == ((1, 0) if left == "d0" else (0, 0))
    router.release("q", 0.7, 5)
    assert booked(router, left) == (0, 0)


def test_booking_whose_decode_replica_died_ends_with_its_caller_or_its_lease() -> None:
    router = make_pools(replica_ids=("p0", "d0"), lease_s=60.0)
    decide(router, "q", caller="g1")
    router.remove_replica("d0", 0.5)
    assert router.requests_of("g1") == ["q"]
    router.step(61.0)
    assert booked(router, "p0") == (0, 0)
    assert router.requests_of("g1") == []


def test_tenant_is_charged_once_for_a_pair() -> None:
    router = make_pools(replica_ids=("p0", "d0"))
    for name in ("a", "b"):
        router.submit(request(name, tokens=1_600, tenant="t"), 0.0)
    assert len(router.step(0.0)) == 2
    num_more = 0
    for number in range(8):  # some wait, and show their tenant's counter
        router.submit(request(f"more{number}", tokens=1_600, tenant="t"), 0.0)
        num_more += len(router.step(0.0))

    def service() -> float:
        view = router.describe(0.0)["m"]
        assert isinstance(view, dict)
        return float(view["tiers"]["0"]["tenants"]["t"]["service"])

    # 1,600 computed tokens and twice 64 expected ones for each that went
    assert service() == (2 + num_more) * (1_600 + 2 * 64)
    router.release_prefill("a", 0.1)
    router.release("a", 0.2, 10)
    assert service() == (2 + num_more) * (1_600 + 2 * 64) - 2 * 54


def test_short_uncached_part_is_computed_where_it_is_decoded() -> None:
    router = make_pools()
    conversation = keys_of(7, length=100)
    router.apply_report(pool_report("d1", keys=conversation, num_running=20, num_steps=1), 0.1)
    router.apply_report(pool_report("p0", keys=conversation[:80], num_steps=1), 0.1)
    turn = decide(router, "turn", 0.1, tokens=1_604, keys=conversation)
    assert (turn.prefill_replica_id, turn.replica_id, turn.num_cached_tokens) == (None, "d1", 1_600)
    assert booked(router, "d1") == (1, 4)
    # with as much again to compute, the pair is chosen; its prefill replica is the one that knows the first part
    longer = decide(router, "longer", 0.1, tokens=3_204, keys=(*conversation, *keys_of(8, length=100)))
    assert (longer.prefill_replica_id, longer.replica_role, longer.num_cached_tokens) == ("p0", "decode", 1_280)


def test_slow_links_draw_a_pair_to_the_decode_replica_that_holds_the_prefix() -> None:
    router = make_pools(replica_ids=("p0",))
    conversation = keys_of(7, length=100)
    for replica_id in ("d0", "d1"):
        cached = conversation if replica_id == "d1" else ()
        router.apply_report(pool_report(replica_id, keys=cached, num_running=20, transfer_tokens_per_s=400.0), 0.0)
    decision = decide(router, "q", tokens=2_404, keys=(*conversation, *keys_of(8, length=50)))
    assert (plan(decision), decision.replica_id) == (("p", "d"), "d1")


def test_length_from_which_a_pair_computes_moves_with_the_measured_rates() -> None:
    def least_pair_tokens(**stats: object) -> int:
        router = make_router()
        router.apply_report(pool_report("p0", prefill_tokens_per_s=20_000.0), 0.0)
        router.apply_report(
            pool_report("d0", **({"num_running": 20, "decode_step_s": 0.02, "prefill_tokens_per_s": 20_000.0} | stats)), 0.0
        )
        for tokens in range(1, 2_000):
            is_pair = plan(decide(router, f"q{tokens}", tokens=tokens)) == ("p", "d")
            router.release(f"q{tokens}", 0.0)
            if is_pair:
                return tokens
        raise AssertionError("never a pair")

    usual = least_pair_tokens()
    assert 10 < usual < 200
    assert least_pair_tokens(num_running=40) < usual, "more answers would be held up"
    assert least_pair_tokens(prefill_tokens_per_s=40_000.0) > usual, "a decode replica that is measured to be faster holds them up less"
    assert least_pair_tokens(decode_step_s=0.04) > usual, "more fits beside the reading of weights, and taking KV in takes longer"
    assert least_pair_tokens(transfer_tokens_per_s=500.0) > usual, "the KV takes longer than it would to compute it"


@pytest.mark.parametrize(
    ("unusable", "expected"), [("prefill", (None, "d")), ("decode", (None, "p"))], ids=["no prefill pool", "no decode pool"]
)
@pytest.mark.parametrize("way", ["absent", "dead", "draining", "fenced", "silent", "excluded"])
@pytest.mark.parametrize("policy", ["scoring", "least_loaded"])
def test_pool_that_cannot_be_used_is_replaced_by_the_other(
    policy: PolicyName, way: str, unusable: Role, expected: tuple[str | None, str]
) -> None:
    lost = tuple(replica_id for replica_id, role in ROLES.items() if role == unusable)
    kept = tuple(replica_id for replica_id in ROLES if replica_id not in lost)
    router = make_pools(policy, kept if way == "absent" else tuple(ROLES))
    now_s = 100.0
    for replica_id in kept if way == "silent" else kept + lost:
        if way != "absent" or replica_id in kept:
            is_draining = way == "draining" and replica_id in lost
            router.apply_report(pool_report(replica_id, is_draining=is_draining, num_running=20, num_steps=1), now_s)
    if way == "dead":
        for replica_id in lost:
            router.remove_replica(replica_id, now_s)
    if way == "fenced":
        router.set_fenced(frozenset(lost))
    decision = decide(router, "q", now_s, excluded=frozenset(lost) if way == "excluded" else frozenset())
    assert plan(decision) == expected
    assert decision.replica_role == ROLES[decision.replica_id]


def test_overloaded_prefill_pool_is_replaced_by_the_decode_pool_and_the_other_way_round() -> None:
    router = make_pools(replica_ids=("p0", "d0"))
    router.apply_report(pool_report("p0", num_uncomputed_tokens=200_000, num_running=1, num_steps=1), 0.0)
    assert plan(decide(router, "q")) == (None, "d")
    router = make_pools(replica_ids=("p0", "d0"))
    router.apply_report(pool_report("d0", num_running=64, num_waiting=60, decode_step_s=0.2, num_steps=1), 0.0)
    assert plan(decide(router, "q")) == (None, "p"), "the decode pool is behind by more than an answer takes"


def test_whole_and_solitary_requests_get_one_replica() -> None:
    router = make_pools(replica_ids=("p0", "d0"))
    assert decide(router, "whole", is_whole=True).prefill_replica_id is None
    short = decide(router, "short", tokens=2, is_whole=True)
    assert plan(short) == (None, "d")
    router.release("whole", 0.0)
    alone = decide(router, "alone", is_alone=True)  # p0 is the one where nothing runs
    assert (alone.prefill_replica_id, alone.replica_id, alone.replica_role) == (None, "p0", "prefill")


def test_pair_waits_until_both_sides_take_it_and_lets_others_pass() -> None:
    router = make_pools(replica_ids=("p0", "d0"), dispatch_ahead=1)
    router.apply_report(pool_report("p0", num_uncomputed_tokens=1_000, num_waiting=1, num_running=1, num_steps=1), 0.0)
    router.submit(request("long", tokens=1_600), 0.0)
    router.submit(request("short", tokens=2), 0.0)
    assert [(answer.request_id, plan(answer)) for answer in router.step(0.0) if isinstance(answer, Decision)] == [("short", (None, "d"))]
    assert booked(router, "p0") == (0, 0)
    router.apply_report(pool_report("p0", num_running=1, num_steps=2), 0.5)
    assert [(answer.request_id, plan(answer)) for answer in router.step(0.5) if isinstance(answer, Decision)] == [("long", ("p", "d"))]


def test_decode_side_waits_for_no_prefill_and_stays_booked_while_the_prefill_is_queued() -> None:
    router = make_pools(replica_ids=("p0", "d0"), dispatch_ahead=None, booking_expiry_s=5.0)
    for number in range(4):
        assert plan(decide(router, f"q{number}")) == ("p", "d")
    assert state_of(router, "p0")["predicted_num_waiting"] == 3
    assert state_of(router, "d0")["predicted_num_waiting"] == 0
    for now_s in (4.0, 10.0, 20.0):  # however late the prefill pool is
        router.apply_report(pool_report("d0", num_running=20, num_steps=2), now_s)
        router.step(now_s)
        assert booked(router, "d0") == (4, 0)
    for number in range(4):
        router.release_prefill(f"q{number}", 20.1)
    for now_s, num_booked in ((24.0, 4), (26.0, 0)):  # handed over, and never seen there
        router.apply_report(pool_report("d0", num_running=20, num_steps=2), now_s)
        router.step(now_s)
        assert booked(router, "d0") == (num_booked, 0)


def test_report_counts_the_request_that_came_alone_before_the_pair_that_still_waits_for_kv() -> None:
    router = make_pools(replica_ids=("p0", "d0"))
    decide(router, "ahead")
    decide(router, "pair")  # its prefill starts in 1.6 s
    assert plan(decide(router, "alone", tokens=2)) == (None, "d")
    assert booked(router, "d0") == (3, 2)
    router.apply_report(pool_report("d0", num_running=22, num_steps=1), 0.2)
    assert booked(router, "d0") == (1, 0)


def test_full_slots_of_the_decode_pool_count_pairs_on_their_way() -> None:
    router = make_pools(replica_ids=("p0", "d0", "d1"), dispatch_ahead=None)
    for replica_id, num_running in (("d0", 60), ("d1", 20)):
        router.apply_report(pool_report(replica_id, num_running=num_running, num_steps=1), 0.0)
    chosen = Counter(decide(router, f"q{number}", tokens=800).replica_id for number in range(40))
    assert chosen["d1"] >= 3 * chosen["d0"]


def test_burst_spreads_over_both_pools_before_any_report() -> None:
    router = make_pools(dispatch_ahead=None)
    decisions = [decide(router, f"q{number}", keys=keys_of(number, length=100)) for number in range(8)]
    assert all(plan(decision) == ("p", "d") for decision in decisions)
    for side in (Counter(d.prefill_replica_id for d in decisions), Counter(d.replica_id for d in decisions)):
        assert max(side.values()) <= 5


def test_next_with_the_same_prefix_follows_the_pair_before_it_is_reported() -> None:
    router = make_pools(dispatch_ahead=None)
    keys = keys_of(7, length=100)
    first = decide(router, "first", keys=keys)
    second = decide(router, "second", keys=keys)
    assert plan(second) == plan(first) == ("p", "d")
    assert second.prefill_replica_id == first.prefill_replica_id
    router.release("first", 0.1)
    router.release("second", 0.1)
    third = decide(router, "third", keys=keys)
    assert {dict(score.terms)["pending"] for score in third.candidates} == {0.0}, "nothing of them is expected any longer"


def test_explanation_shows_every_plan_with_its_terms() -> None:
    router = make_pools()
    shown = explanation(decide(router, "q"))
    assert shown["role"] == "decode"
    plans = {(entry["prefill_replica"], entry["replica"]): entry["terms"] for entry in shown["candidates"]}  # type: ignore[attr-defined]
    assert {(None, replica_id) for replica_id in ROLES} < set(plans)
    chosen = plans[shown["prefill_replica"], shown["replica"]]
    assert {"wait", "prefill", "capacity", "handoff", "decode", "crowding"} <= set(chosen)
    assert {prefill for prefill, _ in plans} == {None, "p0", "p1"}


def test_describe_tells_pools_and_plans() -> None:
    router = make_pools()
    decide(router, "q")
    view = router.describe(0.0)["m"]
    assert isinstance(view, dict)
    assert view["num_usable_by_pool"] == {"prefill": 2, "decode": 2}
    assert (view["num_plans"], view["num_prefill_bookings"]) == ({"pair": 1}, 1)
    assert view["replicas"]["p0"]["role"] == "prefill"


KINDS = ["submit"] * 3 + ["report"] * 2 + ["handed over"] * 2 + ["release", "cancel", "remove", "restart", "fence", "wait"]
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.integers(0, 30)), max_size=80)


class _World:
    """What has happened so far, for routers that are to be told the same."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.submitted: list[str] = []
        self.answered: Counter[str] = Counter()
        self.cancelled: set[str] = set()
        self._epochs = dict.fromkeys(ROLES, 1)
        self._accepted = dict.fromkeys(ROLES, 20)

    def act(self, routers: list[Router], kind: str, number: int, value: int) -> None:
        self.now_s += value if kind == "wait" else 0.01
        replica_id, target = [*ROLES][number], self.submitted[value % len(self.submitted)] if self.submitted else "nobody"
        if kind == "submit":
            self.submitted.append(f"q{len(self.submitted)}")
        elif kind == "cancel":
            self.cancelled.add(target)
        elif kind == "restart":
            self._epochs[replica_id] += 1
        elif kind == "report":
            self._accepted[replica_id] += 1
        for router in routers:
            self._tell(router, kind, replica_id, target, value)

    def _tell(self, router: Router, kind: str, replica_id: str, target: str, value: int) -> None:
        now_s, num_accepted = self.now_s, self._accepted[replica_id]
        if kind == "submit":
            keys = keys_of(value % 4, value, length=value + 1)
            router.submit(request(self.submitted[-1], tokens=40 * (value + 1), keys=keys, is_whole=value == 3), now_s)
        elif kind in ("report", "restart"):
            stats = {"num_finished": num_accepted, "num_steps": num_accepted}
            router.apply_report(pool_report(replica_id, epoch=self._epochs[replica_id], **stats), now_s)
        elif kind == "handed over":
            router.release_prefill(target, now_s)
        elif kind == "release":
            router.release(target, now_s, value)
        elif kind == "cancel":
            router.cancel(target, now_s)
        elif kind == "remove":
            router.remove_replica(replica_id, now_s)
        elif kind == "fence":
            router.set_fenced(frozenset(list(ROLES)[: value % 4]))

    def end(self, router: Router) -> None:
        """Replicas are there again; all that waits is answered, and all that was answered ends."""
        router.set_fenced(frozenset())
        for replica_id in ROLES:
            router.apply_report(pool_report(replica_id, epoch=self._epochs[replica_id] + 1), self.now_s)
        for _ in range(1_000):
            self.answered.update(answer.request_id for answer in router.step(self.now_s))
            for name in self.answered:
                router.release_prefill(name, self.now_s)
                router.release(name, self.now_s, 1)
            if not router.num_waiting:
                return
            self.now_s += 1.0


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(POLICIES), EVENTS)
def test_bookings_of_both_sides_come_back_to_zero_whatever_happens(policy: PolicyName, events: list[tuple[str, int, int]]) -> None:
    routers = [make_pools(policy, max_queue_requests=12, no_replica_timeout_s=50.0) for _ in range(2)]
    world = _World()
    for kind, number, value in events:
        world.act(routers, kind, number, value)
        answers, again = (router.step(world.now_s) for router in routers)
        assert answers == again, "the same events give the same decisions"
        world.answered.update(answer.request_id for answer in answers)
        for answer in answers:
            if isinstance(answer, Decision) and answer.prefill_replica_id is not None:
                assert (ROLES[answer.prefill_replica_id], answer.replica_role) == ("prefill", "decode")
    router = routers[0]
    world.end(router)
    assert all(count == 1 for count in world.answered.values())
    assert set(world.submitted) <= set(world.answered) | world.cancelled
    view = router.describe(world.now_s)["m"]
    assert isinstance(view, dict)
    assert (view["num_waiting"], view["num_bookings"], view["num_prefill_bookings"]) == (0, 0, 0)
    for state in view["replicas"].values():
        assert (state["num_booked_requests"], state["num_booked_prefill_tokens"]) == (0, 0)
