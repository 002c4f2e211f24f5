"""Callers that fall silent lose their lease, and no others."""

from __future__ import annotations

from router.live.caller_leases import CallerLeases


class _Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_caller_that_renews_is_never_expired() -> None:
    clock = _Clock()
    leases = CallerLeases(10.0, clock)
    for _ in range(10):
        leases.renew("g")
        clock.now_s += 9.0
        assert leases.take_expired() == []
        assert leases.dead_among(["g"]) == ()


def test_silent_caller_expires_once_and_stays_dead() -> None:
    clock = _Clock()
    leases = CallerLeases(10.0, clock)
    leases.renew("g")
    leases.renew("h")
    clock.now_s += 5.0
    leases.renew("h")
    clock.now_s += 6.0
    assert leases.take_expired() == ["g"]
    assert leases.take_expired() == []
    assert leases.dead_among(["g", "h"]) == ("g",)


def test_caller_that_comes_back_has_a_lease_again() -> None:
    clock = _Clock()
    leases = CallerLeases(10.0, clock)
    leases.renew("g")
    clock.now_s += 11.0
    assert leases.take_expired() == ["g"]
    leases.renew("g")
    assert leases.dead_among(["g"]) == ()


def test_unknown_caller_has_a_whole_lease_after_a_restart() -> None:
    clock = _Clock()
    leases = CallerLeases(10.0, clock)
    clock.now_s += 9.0
    assert leases.dead_among(["from before"]) == ()
    clock.now_s += 2.0
    assert leases.dead_among(["from before"]) == ("from before",)
