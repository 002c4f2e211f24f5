"""Silent replicas are removed only when their process is gone."""

from __future__ import annotations

from router.liveness import LivenessMonitor


class _World:
    def __init__(self, living: set[str]) -> None:
        self.living = living
        self.now_s = 0.0
        self.num_asked = 0
        self.removed: list[str] = []
        self.monitor = LivenessMonitor(self.find_living, self.removed.append, silence_s=3.0, clock=lambda: self.now_s)

    async def find_living(self) -> frozenset[str]:
        self.num_asked += 1
        return frozenset(self.living)


async def test_reporting_replicas_are_not_asked_about() -> None:
    world = _World({"a"})
    world.monitor.hear("a")
    world.now_s = 3.0
    await world.monitor.check()
    assert world.num_asked == 0


async def test_silent_and_dead_replica_is_removed_once() -> None:
    world = _World({"a"})
    world.monitor.hear("a")
    world.monitor.hear("b")
    world.now_s = 4.0
    world.monitor.hear("a")
    await world.monitor.check()
    await world.monitor.check()
    assert world.removed == ["b"]


async def test_silent_but_living_replica_stays() -> None:
    world = _World({"a"})
    world.monitor.hear("a")
    world.now_s = 100.0
    await world.monitor.check()
    assert (world.removed, world.num_asked) == ([], 1)


async def test_forgotten_replica_is_not_removed_again() -> None:
    world = _World(set())
    world.monitor.hear("a")
    world.monitor.forget("a")
    world.now_s = 100.0
    await world.monitor.check()
    assert world.removed == []


async def test_living_that_cannot_be_asked_for_remove_nobody_and_are_asked_for_again() -> None:
    world = _World(set())
    answers = iter([ConnectionError("the control store restarts"), frozenset[str]()])

    async def find_living() -> frozenset[str]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monitor = LivenessMonitor(find_living, world.removed.append, clock=lambda: world.now_s)
    monitor.hear("a")
    world.now_s = 100.0
    await monitor.check()
    assert world.removed == []
    await monitor.check()
    assert world.removed == ["a"]
