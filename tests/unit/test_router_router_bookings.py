"""What the router books for requests that it has dispatched, until reports show them."""

from __future__ import annotations

from tests.router_harness import keys_of, make_router, report, request, state_of


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
