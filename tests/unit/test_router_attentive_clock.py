"""Time in which the owner does not run is nobody's silence."""

from __future__ import annotations

import pytest

from router.live.attentive_clock import AttentiveClock


class _World:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.clock = AttentiveClock(interval_s=0.5, clock=lambda: self.now_s)

    def run(self, seconds: float) -> None:
        """Ticks in time."""
        for _ in range(round(seconds / 0.5)):
            self.now_s += 0.5
            self.clock.tick()


def test_clock_of_an_owner_that_runs_is_the_real_one() -> None:
    world = _World()
    start_s = world.clock()
    world.run(5.0)
    assert world.clock() - start_s == pytest.approx(5.0)


def test_clock_loses_what_a_stopped_owner_missed() -> None:
    world = _World()
    start_s = world.clock()
    world.run(2.0)
    world.now_s += 60.0
    assert world.clock() - start_s == pytest.approx(3.0)  # before the tick that comes late, too
    world.clock.tick()
    assert world.clock() - start_s == pytest.approx(3.0)
    world.run(2.0)
    assert world.clock() - start_s == pytest.approx(5.0)


def test_clock_takes_a_tick_that_is_a_little_late_for_one_in_time() -> None:
    world = _World()
    start_s = world.clock()
    for _ in range(5):
        world.now_s += 0.9
        world.clock.tick()
    assert world.clock() - start_s == pytest.approx(4.5)
