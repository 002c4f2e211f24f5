"""What a configuration asks of one machine, counted by hand: router 0.1 CPU and gateway 0.1 beside the replicas."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.serve.needs import needs_of, why_no_room
from cluster.settings.config import read_config

TWO_CORES = {"CPU": 2.0}


def reason(machine: dict[str, float], **model: Any) -> str | None:
    return why_no_room(*needs_of(read_config({"models": [{"name": "a", **model}]})), machine)


def test_two_replicas_of_one_cpu_on_two_cores_are_told_the_number_that_fits() -> None:
    found = reason(TWO_CORES, num_replicas=2, num_cpus=1.0)
    assert found is not None
    assert "2.2 CPUs are wanted (2 of replica-a at num_cpus 1; router and gateways 0.2), and Ray counts 2 here" in found
    assert "num_cpus 0.9 (replica-a) fits" in found
    assert "\n" not in found


@pytest.mark.parametrize(("num_cpus", "fits"), [(0.9, True), (0.91, False)])
def test_number_that_is_told_fits_and_more_does_not(num_cpus: float, fits: bool) -> None:
    assert (reason(TWO_CORES, num_replicas=2, num_cpus=num_cpus) is None) is fits


def test_every_rank_of_every_replica_of_a_pool_counts() -> None:
    pools = {"prefill": {"num_replicas": 1, "num_cpus": 2}, "decode": {"num_replicas": 2, "engine": {"tensor_parallel_size": 2}}}
    found = reason({"CPU": 3.2}, mode="disaggregated", num_cpus=1, **pools)
    assert found is not None
    assert "6.2 CPUs are wanted" in found  # 1 * 2 + 2 * 2 * 1 + 0.2
    assert "num_cpus 1 (replica-a-prefill), 0.5 (replica-a-decode) fits" in found
    assert reason({"CPU": 6.2}, mode="disaggregated", num_cpus=1, **pools) is None


def test_machine_without_room_beside_the_gateway_is_told_to_run_fewer() -> None:
    assert "fewer gateways or replicas" in (reason({"CPU": 0.2}) or "")


@pytest.mark.parametrize(("machine", "fits"), [({"CPU": 8.0}, False), ({"CPU": 8.0, "GPU": 1.0}, False), ({"CPU": 8.0, "GPU": 2.0}, True)])
def test_gpu_that_no_machine_has_is_named(machine: dict[str, float], fits: bool) -> None:
    found = reason(machine, num_replicas=2, num_gpus=1.0)
    assert (found is None) is fits
    if found is not None:
        assert found.startswith("replica-a wants 2 GPUs (2 replicas, 1 ranks each, num_gpus 1)")
        assert f"Ray finds {machine.get('GPU', 0):g} here" in found
