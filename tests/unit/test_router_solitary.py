from __future__ import annotations

from router.snapshot import Decision, Rejection
from tests.router_harness import make_router, replicas_of, report, request


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
