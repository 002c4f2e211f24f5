"""Room on this machine, with what Serve's own sections of a config change."""

from __future__ import annotations

import os
from typing import Any

import pytest

from cluster.local.preflight import LaunchError
from cluster.local.room import check_room, machine_resources
from cluster.settings.config import read_config

ARGS = {"models": [{"name": "a", "num_replicas": 1, "num_cpus": 1.0}]}


def check(num_cpus: float, *deployments: dict[str, Any], num_applications: int = 1) -> None:
    applications = [{"args": ARGS, "deployments": list(deployments)}, "not a mapping"]
    check_room({"applications": applications}, [read_config(ARGS)] * num_applications, {"CPU": num_cpus})


def test_config_that_fits_passes_and_one_core_less_is_refused() -> None:
    check(1.2)
    with pytest.raises(LaunchError, match=r"1\.2 CPUs are wanted"):
        check(1.0)


@pytest.mark.parametrize(
    "change",
    [
        {"num_replicas": 3},
        {"ray_actor_options": {"num_cpus": 3}},
        {"num_replicas": "auto", "autoscaling_config": {"min_replicas": 3}},
        {"autoscaling_config": {"min_replicas": 3, "max_replicas": 9}},
    ],
)
def test_change_in_serves_own_section_counts(change: dict[str, Any]) -> None:
    check(3.2, {"name": "replica-a", **change})
    with pytest.raises(LaunchError, match=r"3\.2 CPUs are wanted"):
        check(3.1, {"name": "replica-a", **change})


def test_applications_add_up() -> None:
    check(2.4, num_applications=2)
    with pytest.raises(LaunchError, match=r"2\.4 CPUs are wanted"):
        check(2.3, num_applications=2)


def test_cores_are_those_that_ray_counts() -> None:
    assert 1 <= machine_resources()["CPU"] <= (os.cpu_count() or 1)
