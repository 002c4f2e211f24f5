"""Cores of several engines on one machine: shares, refusals, and claims that nobody else gets."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from replicas.process.cores import CoreDemand, neighbouring_cores, threads_of_engine, try_claim_cores


@pytest.fixture
def namespace() -> str:
    return f"manta-test-{uuid.uuid4().hex}"


@pytest.mark.parametrize(
    ("engines", "wanted", "num_cores", "num_machines", "expected"),
    [
        ([(1, None)], None, 8, 1, 8),
        ([(2, None)], None, 8, 1, 4),
        ([(3, None)], None, 8, 1, 2),
        ([(3, None)], None, 3, 2, 1),  # one machine has two of them
        ([(1, 3), (2, None)], None, 8, 1, 2),
        ([(2, 4)], 4, 8, 1, 4),
        ([(4, 4)], 4, 8, 2, 4),
        ([(1, 2), (1, 6)], 6, 8, 1, 6),  # two models: not 2 x 6
    ],
)
def test_threads_of_engine_never_exceed_the_cores_together(
    engines: list[tuple[int, int | None]], wanted: int | None, num_cores: int, num_machines: int, expected: int
) -> None:
    demand = CoreDemand.of(engines)
    assert threads_of_engine(wanted, demand, num_cores=num_cores, num_machines=num_machines) == expected


@pytest.mark.parametrize(
    ("engines", "wanted", "num_cores", "together"),
    [([(2, 2)], 2, 2, 4), ([(1, 3)], 3, 2, 3), ([(1, 2), (1, None)], 2, 2, 3)],
)
def test_threads_of_engine_refuses_more_threads_than_cores(
    engines: list[tuple[int, int | None]], wanted: int, num_cores: int, together: int
) -> None:
    with pytest.raises(ValueError, match=f"would have {together} threads for {num_cores} cores; lower num_threads or num_replicas"):
        threads_of_engine(wanted, CoreDemand.of(engines), num_cores=num_cores)


@pytest.mark.parametrize("wanted", [None, 1])
def test_threads_of_engine_more_engines_than_cores_have_one_each_with_a_warning(
    wanted: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert threads_of_engine(wanted, CoreDemand.of([(3, wanted)]), num_cores=2) == 1
    assert "3 engine threads on a machine with 2 cores" in caplog.text


def test_claims_do_not_overlap_and_come_back(namespace: str) -> None:
    first = try_claim_cores(2, [0, 1, 2, 3, 4], namespace)
    second = try_claim_cores(2, [0, 1, 2, 3, 4], namespace)
    assert first is not None
    assert second is not None
    assert (first.cores, second.cores) == ((0, 1), (2, 3))
    assert try_claim_cores(2, [0, 1, 2, 3, 4], namespace) is None
    first.close()
    third = try_claim_cores(3, [0, 1, 2, 3, 4], namespace)
    assert third is not None
    assert third.cores == (0, 1, 4)
    second.close()
    third.close()


def test_claim_of_a_killed_process_is_free_again(namespace: str) -> None:
    code = (
        "import sys, time; from replicas.process.cores import try_claim_cores; "
        f"claim = try_claim_cores(1, [7], {namespace!r}); print(claim.cores, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "(7,)\n"
        assert try_claim_cores(1, [7], namespace) is None
        other.kill()
    claim = try_claim_cores(1, [7], namespace)
    assert claim is not None
    claim.close()


def test_pinned_thread_and_what_it_starts_stay_on_their_cores(namespace: str) -> None:
    core = max(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    seen: list[set[int]] = []

    def engine() -> None:
        claim = try_claim_cores(1, [core], namespace)
        assert claim is not None
        claim.pin_thread()
        child = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        child.start()
        child.join()
        claim.close()

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    assert seen == [{core}]
    assert os.sched_getaffinity(0) == before, "the loop's own thread stays free"


def test_neighbouring_cores_keep_the_threads_of_a_core_together(tmp_path: Path) -> None:
    for core, (package, physical) in enumerate([(0, 0), (0, 1), (1, 0), (0, 0), (0, 1), (1, 0)]):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{physical}\n")
    assert neighbouring_cores(range(6), tmp_path) == [0, 3, 1, 4, 2, 5]
    assert neighbouring_cores({2, 0}, tmp_path / "none") == [0, 2]
