"""Kills one of three nodes of a Ray cluster on this machine during streams. `make chaos` runs it after its scenarios.

Every node is a raylet of its own with one replica. Everything on the node dies with it, so a node without a gateway is chosen, because
a gateway's connections would break: the streams must continue on other nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from cluster.local.ray_head import RAY_ENVIRONMENT
from replicas.model.default_model import prepare_default_model
from tests.chaos.served_cluster import MODEL
from tests.chaos.streams import Load, golden_streams
from tests.small_served_model import save_small_model

APP = "manta"
NODE_BYTES = 96 * 2**20  # object store; nothing of ours goes through it


async def replicas_of(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=10) as http:
        try:
            return (await http.get(f"{url}/debug/router")).json().get(MODEL, {}).get("replicas", {})
        except (httpx.HTTPError, ValueError):
            return {}


async def wait_replicas(url: str, num_replicas: int, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while len(await replicas_of(url)) != num_replicas:
            await asyncio.sleep(0.2)


def node_without_gateway(cluster: Any) -> Any:
    """A node other than the head, on which no gateway runs."""
    from ray.serve.context import _get_global_client

    replicas = _get_global_client().get_serve_details()["applications"][APP]["deployments"]["gateway"]["replicas"]
    taken = {replica["node_id"] for replica in replicas}
    return next(node for node in cluster.worker_nodes if node._node_id not in taken)


async def run(url: str, cluster: Any, num_streams: int, num_tokens: int) -> list[str]:
    await wait_replicas(url, 3, 120.0)
    golden = await golden_streams(url, num_streams, num_tokens)
    node = node_without_gateway(cluster)
    async with Load(url, num_streams, num_tokens, golden) as load:
        await load.wait_begun()
        harmed_s = time.monotonic()
        await asyncio.to_thread(cluster.remove_node, node, False)
        streams = await load.wait_ended()
    pauses = sorted(stream.longest_gap_s(harmed_s) for stream in streams)
    print(f"a node of three died: longest pause {pauses[-1]:.2f} s, median {pauses[len(pauses) // 2]:.2f} s", *load.faults(), sep="\n    ")
    await wait_replicas(url, 2, 30.0)
    cluster.add_node(num_cpus=1, object_store_memory=NODE_BYTES)
    await wait_replicas(url, 3, 120.0)
    print("a new node came, and a replica on it")
    return load.faults()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.nodes", description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--folder", type=Path, default=Path("build/chaos"))
    arguments = parser.parse_args()
    os.environ.update(RAY_ENVIRONMENT)  # before the first import of ray.serve: it reads them once
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from cluster.app import build

    model = arguments.folder.resolve() / "model"
    if not (model / "config.json").exists():
        save_small_model(model, prepare_default_model())
    engine = {"model": str(model), "dtype": "float32", "kv_cache_bytes": 64 * 2**20, "num_threads": 1}
    args = {"models": [{"name": MODEL, "num_replicas": 3, "num_cpus": 0.8, "engine": engine}]}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    head = {"num_cpus": 1, "object_store_memory": NODE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=NODE_BYTES)
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        serve.run(build(args), name=APP, route_prefix="/")
        faults = asyncio.run(run(f"http://127.0.0.1:{port}", cluster, arguments.streams, arguments.tokens))
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
