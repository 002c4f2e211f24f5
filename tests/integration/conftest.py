"""One Ray, and deployments of a tiny random model, shared by every test of this folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.local.ray_head import RAY_ENVIRONMENT
from tests.integration.deployed import Deployed
from tests.small_served_model import save_small_model

APP = "manta"
MODEL = "tiny"
CALLER_LEASE_S = 4.0

os.environ.update(RAY_ENVIRONMENT)  # before any test module imports ray.serve, which reads them once


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> Path:
    return save_small_model(tmp_path_factory.mktemp("tiny-llama"), default_model_dir)


@pytest.fixture(scope="session")
def local_ray() -> Iterator[int]:
    """A Ray of this session's own, with Serve; the port of its proxy."""
    import ray
    from ray import serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # "local": a file that another Ray left in its temporary folder must not make this one look for that cluster.
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=128 * 2**20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        yield port
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="session")
def deployed(local_ray: int, tiny_model_dir: Path) -> Deployed:
    from ray import serve

    from cluster.app import build

    args: dict[str, Any] = {
        "models": [
            {
                "name": MODEL,
                "num_replicas": 2,
                "num_cpus": 0.5,
                "engine": {"model": str(tiny_model_dir), "dtype": "float32", "kv_cache_bytes": 32 * 2**20, "num_threads": 1},
            }
        ],
        "router": {"caller_lease_s": CALLER_LEASE_S},
        "gateway": {"num_replicas": 2},
    }
    serve.run(build(args), name=APP, route_prefix="/")
    made = Deployed(port=local_ray, app=APP, model=MODEL)
    made.wait_healthy()
    return made
