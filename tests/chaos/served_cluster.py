"""A cluster with a small model, started like `make serve`, whose processes can be killed and stopped by name."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from cluster.local.ray_head import DASHBOARD_PORT
from cluster.local.serve_rest import ServeRest, auth_headers
from replicas.model.default_model import prepare_default_model
from tests.small_served_model import save_small_model

MODEL = "small"
ROUTER, GATEWAY, REPLICA = "router", "gateway", f"replica-{MODEL}"
START_TIMEOUT_S = 300.0
_REPO = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What runs."""

    num_replicas: int = 3
    pools: Mapping[str, int] = field(default_factory=dict)
    """Replicas of each role, in place of `num_replicas` unified ones."""
    num_gateways: int = 2
    drain_s: float = 4.0
    engine: Mapping[str, Any] = field(default_factory=dict)
    router: Mapping[str, Any] = field(default_factory=dict)
    is_default_model: bool = False

    @property
    def deployments(self) -> dict[str, int]:
        """Those of the model's replicas, and how many each has."""
        return {f"{REPLICA}-{role}": num for role, num in self.pools.items()} or {REPLICA: self.num_replicas}


class ServedCluster:
    """Owns one Ray of its own. Use as a context manager; leaving it ends every process."""

    def __init__(self, folder: Path, layout: Layout, port: int = 8000) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._layout = layout
        self._port = port
        self._num_redeploys = 0
        self._headers = auth_headers(os.environ, Path.home())
        self._rest = ServeRest(f"http://127.0.0.1:{DASHBOARD_PORT}", self._headers)
        self._environment = {**os.environ, "MANTA_STATE_DIR": str(folder / "state")}
        self.url = f"http://127.0.0.1:{port}"
        self.layout = layout

    def __enter__(self) -> ServedCluster:
        if not self._layout.is_default_model and not (self._folder / "model" / "config.json").exists():
            save_small_model(self._folder / "model", prepare_default_model())
        path = self._folder / "config.yaml"
        path.write_text(yaml.safe_dump(self._config(self._layout.num_replicas)))
        try:
            self._local("serve", "--config", str(path), "--port", str(self._port))
        except BaseException:
            self._local("stop")
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._local("stop")

    async def view(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """The router's view of the model; empty while the router, or the gateway that is asked, is away."""
        async with httpx.AsyncClient(timeout=timeout_s) as http:
            try:
                return (await http.get(f"{self.url}/debug/router")).json().get(MODEL, {})
            except (httpx.HTTPError, json.JSONDecodeError):
                return {}

    async def pids(self, deployment: str) -> dict[str, int]:
        """Replica id -> process, of those that serve now."""
        async with httpx.AsyncClient(timeout=30, headers=self._headers) as http:
            body = (await http.get(f"http://127.0.0.1:{DASHBOARD_PORT}/api/serve/applications/")).json()
        replicas = body["applications"]["manta"]["deployments"][deployment]["replicas"]
        return {each["replica_id"]: each["pid"] for each in replicas if each["state"] == "RUNNING"}

    async def wait_ready(self, timeout_s: float = 120.0) -> dict[str, Any]:
        """Returns the router's view once everything that should run does, and nothing is left of what ran before.

        Raises TimeoutError with what is missing: a block that is still held is a leak.
        """
        return await self._wait(self._is_ready, timeout_s)

    async def wait_idle(self, timeout_s: float = 20.0) -> dict[str, Any]:
        """Returns the view once no replica that the router knows has a request or holds a block."""
        return await self._wait(self._is_idle, timeout_s)

    async def num_running(self, timeout_s: float = 10.0) -> int | None:
        """Requests inside all replicas, as last reported; None while the router is away."""
        view = await self.view(timeout_s)
        if not view:
            return None
        return sum(replica["num_running"] + replica["num_waiting"] for replica in view["replicas"].values())

    async def redeploy(self) -> None:
        """Changes a setting that every process must restart for, and returns when all of it runs."""
        self._num_redeploys += 1
        await self._deploy(self._layout.num_replicas)

    async def scale(self, num_replicas: int) -> None:
        """Changes the number of replicas alone."""
        await self._deploy(num_replicas)

    def memory_bytes(self, pid: int) -> int:
        """What the process alone occupies (USS)."""
        return int(psutil.Process(pid).memory_full_info().uss)

    async def _deploy(self, num_replicas: int) -> None:
        await asyncio.to_thread(self._rest.deploy, self._config(num_replicas))
        await asyncio.sleep(1.0)  # until Serve says that it is at work
        await asyncio.to_thread(self._rest.wait_running, START_TIMEOUT_S, lambda progress: None)
        self.num_wanted = num_replicas

    async def _is_ready(self, view: dict[str, Any]) -> bool:
        replicas: dict[str, int] = {}
        for deployment in self._layout.deployments:
            replicas |= await self.pids(deployment)
        return (
            len(replicas) == self.num_wanted
            and set(view.get("replicas", {})) == set(replicas)
            and len(await self.pids(GATEWAY)) == self._layout.num_gateways
            and len(await self.pids(ROUTER)) == 1
            and await self._is_idle(view)
        )

    async def _is_idle(self, view: dict[str, Any]) -> bool:
        return bool(view) and view["num_waiting"] == view["num_bookings"] == 0 and all(map(_is_empty, view["replicas"].values()))

    async def _wait(self, holds: Callable[[dict[str, Any]], Any], timeout_s: float) -> dict[str, Any]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            view = await self.view()
            if await holds(view):
                return view
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not so after {timeout_s:.0f} s: {json.dumps(view)[:2000]}")
            await asyncio.sleep(0.2)

    def _local(self, *arguments: str) -> None:
        log = self._folder / "launcher.log"
        with log.open("ab") as output:
            done = subprocess.run(
                [sys.executable, "-m", "cluster.local", *arguments],
                cwd=_REPO,
                env=self._environment,
                stdout=output,
                stderr=output,
                timeout=START_TIMEOUT_S,
                check=False,
            )
        if done.returncode != 0:
            raise RuntimeError(f"{arguments[0]} failed: {log.read_text()[-2000:]}")
        self.num_wanted = sum(self._layout.deployments.values())

    def _config(self, num_replicas: int) -> dict[str, Any]:
        layout = self._layout
        engine = {"max_num_seqs": 64, "num_threads": 1, **layout.engine}
        if not layout.is_default_model:
            engine = {"model": str(self._folder / "model"), "dtype": "float32", "kv_cache_bytes": 64 * 2**20, **engine}
        numbers = {role: {"num_replicas": num} for role, num in layout.pools.items()}
        model = {"mode": "disaggregated", **numbers} if layout.pools else {"num_replicas": layout.num_replicas}
        args = {
            "models": [{"name": MODEL, "num_cpus": 0.2, "drain_s": layout.drain_s, "engine": engine, **model}],
            "router": {**layout.router, "seed": self._num_redeploys},
            "gateway": {"num_replicas": layout.num_gateways, "drain_s": 300.0},
        }
        application: dict[str, Any] = {"name": "manta", "route_prefix": "/", "import_path": "cluster.app:build", "args": args}
        if num_replicas != layout.num_replicas:
            application["deployments"] = [{"name": REPLICA, "num_replicas": num_replicas}]
        return {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self._port},
            "applications": [application],
        }


def _is_empty(replica: Mapping[str, Any]) -> bool:
    return replica["num_running"] == replica["num_waiting"] == 0 and replica["num_free_blocks"] == replica["num_blocks"]
