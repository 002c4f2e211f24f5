"""Proves a configuration before anything that runs is replaced by it, in a process of its own: engines import torch."""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from cluster.settings.config import ClusterConfig, ConfigError

logger = logging.getLogger(__name__)

PROOF_TIMEOUT_S = 300.0
"""The first one on a machine may compile the kernels, or make the default model."""
_REPO_ROOT = Path(__file__).resolve().parents[2]


def prove(config: ClusterConfig, environment: Mapping[str, str]) -> None:
    """Asks for each model what a replica would find at its start: the model, its support, dtype, quantization, division over ranks, memory.

    `environment` is that of the process. Raises ConfigError: one line that names the model and the fix.
    """
    pools = [(index, model, pool) for index, model in enumerate(config.models) for pool in model.pools]
    found = run_proof([(pool.engine, pool.num_gpus > 0) for _, _, pool in pools], environment)
    num_bytes = 0
    for (index, model, pool), engine in zip(pools, found["engines"], strict=True):
        if "error" in engine:
            raise ConfigError(f"args: models[{index}] ({model.name}): {engine['error']}")
        logger.info("%s (%s): proven, %.2f GiB of weights", model.name, pool.role, engine["weight_bytes"] / 2**30)
        if pool.num_gpus == 0:
            kv_bytes = pool.engine.tensor_parallel_size * (pool.engine.kv_cache_bytes or 0)
            num_bytes += pool.num_replicas * (engine["weight_bytes"] + kv_bytes)
    if num_bytes > found["memory_bytes"] and _num_machines() == 1:
        raise ConfigError(
            f"args: models: weights and kv_cache_bytes of all replicas together take {num_bytes / 2**30:.1f} GiB, and this machine has "
            f"{found['memory_bytes'] / 2**30:.1f} GiB of memory: lower num_replicas or kv_cache_bytes, or choose a smaller model"
        )


def run_proof(engines: list[tuple[Any, bool]], environment: Mapping[str, str], timeout_s: float = PROOF_TIMEOUT_S) -> dict[str, Any]:
    """What `replicas.engine.proof` answers to these engines' configurations, each with whether it is given a GPU. Raises ConfigError if
    it does not answer."""
    variables = {**environment, "PYTHONPATH": f"{_REPO_ROOT}:{environment.get('PYTHONPATH', '')}", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if variables.get("CUDA_VISIBLE_DEVICES") == "":  # how Ray hides GPUs from a task that reserves none
        del variables["CUDA_VISIBLE_DEVICES"]
    try:
        process = subprocess.run(
            [sys.executable, "-m", "replicas.engine.proof"],
            input=pickle.dumps(engines),
            env=variables,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"args: models: not proven within {timeout_s:.0f} s; nothing was changed, try again") from error
    try:
        answer: dict[str, Any] = json.loads(process.stdout)
    except ValueError as error:
        lines = process.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"it ended with {process.returncode}"
        raise ConfigError(f"args: models: cannot be proven, nothing was changed: {reason}") from error
    return answer


def _num_machines() -> int:
    return max(1, sum(bool(node["Alive"]) for node in ray.nodes())) if ray.is_initialized() else 1
