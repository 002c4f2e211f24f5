from __future__ import annotations

import pytest

from cluster.serve.needs import Need
from cluster.serve.surge import num_replicas, num_successors


@pytest.mark.parametrize(
    ("num_wanted", "num_running", "expected"),
    [
        (1, 1, 1),  # one more than wanted
        (2, 1, 2),  # the one that is missing, and one more
        (5, 1, 5),  # never more than wanted
        (3, 3, 1),
        (1, 2, 1),
        (200, 200, 2),  # one for each hundred
        (4, 0, 4),
    ],
)
def test_successors_that_serve_starts_at_once(num_wanted: int, num_running: int, expected: int) -> None:
    assert num_successors(Need(deployment="a", num_replicas=num_wanted, bundle={"CPU": 1}), num_running) == expected


def test_replicas_are_counted_by_the_names_of_their_actors() -> None:
    replicas = [f"SERVE_REPLICA::manta#{name}" for name in ("replica-a#hdhmc6re", "replica-a#1ffmkyws", "gateway#180715db")]
    assert num_replicas(["SERVE_CONTROLLER_ACTOR", "SERVE_PROXY_ACTOR-904d", "SERVE_REPLICA::odd", *replicas]) == {
        "replica-a": 2,
        "gateway": 1,
    }
