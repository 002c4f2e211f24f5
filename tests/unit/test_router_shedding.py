from __future__ import annotations

import pytest

from router.snapshot import Rejection
from tests.router_harness import make_router, report, request


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
