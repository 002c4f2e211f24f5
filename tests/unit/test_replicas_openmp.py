"""How torch's OpenMP threads wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from replicas.process.openmp import SPIN_COUNT, limit_spinning


@pytest.mark.parametrize(
    ("variables", "spin_count"),
    [({}, SPIN_COUNT), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, None)],
    ids=["nothing is set", "a count is set", "a policy is set"],
)
def test_spinning_is_limited_unless_the_user_decides(variables: dict[str, str], spin_count: str | None) -> None:
    found = dict(variables)
    limit_spinning(found)
    assert found == variables | ({"GOMP_SPINCOUNT": spin_count} if spin_count else {})


@pytest.mark.parametrize("module", ["replicas.llm", "replicas.deployment", "replicas.ranks.rank_process"])
def test_processes_that_compute_set_it_before_torch_loads(module: str) -> None:
    """The finder of modules notes what is set when torch is first looked for."""
    script = f"""
import json, os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(json.dumps(os.environ.get("GOMP_SPINCOUNT")), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
import {module}
import torch
"""
    variables = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout) == SPIN_COUNT
