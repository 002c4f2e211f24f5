"""What losing replicas costs a choice: how long it waits, when it runs alone, and when it is given up."""

from __future__ import annotations

import pytest

from cluster.failures import ReplicaDied, ReplicaGone, ReplicaHung, ReplicaLeft
from cluster.generation.replica_losses import ReplicaLosses
from cluster.settings.failover import FailoverPolicy


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def losses_of(clock: Clock, *, max_deaths: int = 3, replica_timeout_s: float = 120.0) -> ReplicaLosses:
    return ReplicaLosses(FailoverPolicy(max_deaths=max_deaths, replica_timeout_s=replica_timeout_s), clock)


def test_replicas_never_lost_before_cost_no_pause_and_are_excluded(clock: Clock) -> None:
    losses = losses_of(clock)
    assert [losses.add(ReplicaLeft(name, "drains"), 0) for name in ("a", "b", "c")] == [0.0, 0.0, 0.0]
    assert losses.replica_ids == {"a", "b", "c"}


def test_replica_lost_again_and_again_doubles_the_pause_up_to_a_second(clock: Clock) -> None:
    losses = losses_of(clock)
    pauses = [losses.add(ReplicaLeft("a", "drains"), 0) for _ in range(7)]
    assert pauses == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


def test_replica_lost_again_after_progress_begins_with_the_shortest_pause(clock: Clock) -> None:
    losses = losses_of(clock)
    for _ in range(5):
        losses.add(ReplicaLeft("a", "drains"), 0)
    assert losses.add(ReplicaLeft("a", "drains"), 1) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("error", "num_deaths"),
    [(ReplicaDied("a", "x"), 1), (ReplicaHung("a", "x"), 1), (ReplicaLeft("a", "x"), 0), (ReplicaGone("a", "x"), 0)],
)
def test_only_a_replica_that_died_or_hangs_counts_as_a_death(clock: Clock, error: ReplicaGone, num_deaths: int) -> None:
    losses = losses_of(clock)
    losses.add(error, 0)
    assert losses.num_deaths == num_deaths


@pytest.mark.parametrize(
    ("max_deaths", "suspect_at", "condemned_at"),
    [(3, 2, 3), (5, 4, 5), (2, 2, 2), (1, 2, 1)],
)
def test_choice_runs_alone_before_its_last_death_but_never_for_a_single_one(
    clock: Clock, max_deaths: int, suspect_at: int, condemned_at: int
) -> None:
    losses = losses_of(clock, max_deaths=max_deaths)
    first_suspect = first_condemned = None
    for count in range(1, 6):
        losses.add(ReplicaDied(f"r{count}", "x"), 0)
        first_suspect = first_suspect or (count if losses.is_suspect else None)
        first_condemned = first_condemned or (count if losses.is_condemned else None)
    assert (first_suspect, first_condemned) == (suspect_at, condemned_at)


def test_waiting_is_counted_from_the_first_loss_after_the_last_token(clock: Clock) -> None:
    losses = losses_of(clock, replica_timeout_s=10.0)
    losses.add(ReplicaLeft("a", "drains"), 5)
    clock.now_s += 10.0
    losses.add(ReplicaLeft("a", "drains"), 5)
    assert not losses.has_waited_enough, "ten seconds are allowed"
    clock.now_s += 0.5
    assert losses.has_waited_enough
    losses.add(ReplicaLeft("a", "drains"), 6)
    assert not losses.has_waited_enough, "a token came meanwhile"


def test_pause_is_told_once_from_the_first_loss_to_the_next_token(clock: Clock) -> None:
    losses = losses_of(clock)
    assert losses.take_pause() is None, "nothing is lost yet"
    losses.add(ReplicaDied("a", "x"), 3)
    clock.now_s += 2.0
    losses.add(ReplicaDied("b", "x"), 3)
    clock.now_s += 1.5
    assert losses.take_pause() == pytest.approx(3.5)
    assert losses.take_pause() is None
