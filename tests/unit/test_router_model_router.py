"""Any order of events: each request gets one answer, and the same events give the same answers."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from router.config import PolicyName
from router.router import Router
from tests.router_harness import POLICIES, keys_of, make_router, report, request

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
