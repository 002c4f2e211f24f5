from __future__ import annotations

import pytest

from cluster.surge import Need


@pytest.mark.parametrize(
    ("num_wanted", "num_running", "num_successors"),
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
def test_successors_that_serve_starts_at_once(num_wanted: int, num_running: int, num_successors: int) -> None:
    assert Need(deployment="a", num_replicas=num_wanted, bundle={"CPU": 1}).num_successors(num_running) == num_successors
