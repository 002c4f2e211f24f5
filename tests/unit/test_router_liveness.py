"""Silent replicas are fenced while others speak, and removed only when their process is gone."""

from __future__ import annotations

from router.live.liveness import LivenessMonitor


class _World:
    def __init__(self, living: set[str]) -> None:
        self.living = living
        self.now_s = 0.0
        self.num_asked = 0
        self.removed: list[str] = []
        self.fences: list[set[str]] = []
        self.error: Exception | None = None
        self.monitor = LivenessMonitor(
            self.find_living, self.removed.append, lambda ids: self.fences.append(set(ids)), lambda: self.now_s, hang_s=lambda: 2.0
        )

    async def find_living(self) -> frozenset[str]:
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return frozenset(self.living)


async def test_reporting_replicas_are_not_asked_about() -> None:
    world = _World({"a"})
    world.monitor.hear("a", "m")
    world.now_s = 3.0
    await world.monitor.check_deaths()
    assert world.num_asked == 0


async def test_silent_and_dead_replica_is_removed_once() -> None:
    world = _World({"a"})
    world.monitor.hear("a", "m")
    world.monitor.hear("b", "m")
    world.now_s = 4.0
    world.monitor.hear("a", "m")
    await world.monitor.check_deaths()
    await world.monitor.check_deaths()
    assert world.removed == ["b"]


async def test_silent_but_living_replica_stays() -> None:
    world = _World({"a"})
    world.monitor.hear("a", "m")
    world.now_s = 100.0
    await world.monitor.check_deaths()
    assert (world.removed, world.num_asked) == ([], 1)


async def test_forgotten_replica_is_not_removed_again() -> None:
    world = _World(set())
    world.monitor.hear("a", "m")
    world.monitor.forget("a")
    world.now_s = 100.0
    await world.monitor.check_deaths()
    assert world.removed == []


async def test_living_that_cannot_be_asked_for_remove_nobody_and_are_asked_for_again() -> None:
    world = _World(set())
    world.error = ConnectionError("the control store restarts")
    world.monitor.hear("a", "m")
    world.now_s = 100.0
    await world.monitor.check_deaths()
    assert world.removed == []
    world.error = None
    await world.monitor.check_deaths()
    assert world.removed == ["a"]


def test_silent_replica_is_fenced_until_it_is_heard_again() -> None:
    world = _World({"a", "b"})
    world.monitor.hear("a", "m")
    world.monitor.hear("b", "m")
    world.now_s = 2.5
    world.monitor.hear("b", "m")
    world.monitor.check_silence()
    world.monitor.check_silence()
    world.monitor.hear("a", "m")
    assert world.fences == [{"a"}, set()]


def test_silence_of_all_replicas_of_a_model_fences_nobody() -> None:
    world = _World({"a", "b", "c"})
    for replica_id, model in (("a", "m"), ("b", "m"), ("c", "other")):
        world.monitor.hear(replica_id, model)
    world.now_s = 2.5
    world.monitor.hear("c", "other")
    world.monitor.check_silence()
    assert world.fences == []


def test_fence_of_the_last_one_heard_falls_when_its_peers_fall_silent() -> None:
    world = _World({"a", "b"})
    world.monitor.hear("a", "m")
    world.now_s = 2.5
    world.monitor.hear("b", "m")
    world.monitor.check_silence()
    world.now_s = 6.0
    world.monitor.check_silence()
    assert world.fences == [{"a"}, set()]


def test_removed_replica_is_no_longer_fenced() -> None:
    world = _World({"a", "b"})
    world.monitor.hear("a", "m")
    world.now_s = 2.5
    world.monitor.hear("b", "m")
    world.monitor.check_silence()
    world.monitor.forget("a")
    assert world.fences == [{"a"}, set()]
