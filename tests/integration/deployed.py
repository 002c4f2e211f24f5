"""One deployed application as a test sees it: over HTTP, and by the processes of its replicas."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """Where the application answers, and for what model."""

    port: int
    app: str
    model: str
    prefix: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.prefix}"

    def wait_healthy(self, timeout_s: float = 60) -> None:
        """Returns when every gateway has loaded its tokenizer, as far as eight answers in a row tell: nobody chooses the gateway."""
        deadline_s, num_well = time.monotonic() + timeout_s, 0
        while num_well < 8:
            health = httpx.get(f"{self.url}/health", timeout=10)
            num_well = num_well + 1 if health.status_code == 200 else 0
            assert time.monotonic() < deadline_s, health.text
            if not num_well:
                time.sleep(0.2)

    async def view(self) -> dict[str, Any]:
        """The router's view of the model."""
        async with httpx.AsyncClient() as http:
            return (await http.get(f"{self.url}/debug/router", timeout=10)).json().get(self.model, {"replicas": {}})

    async def explain(self, answer_id: str) -> list[dict[str, Any]]:
        async with httpx.AsyncClient() as http:
            return (await http.get(f"{self.url}/debug/router/explain/{answer_id}", timeout=10)).json()["answers"]

    async def wait_until(self, holds: Callable[[dict[str, Any]], bool], timeout_s: float = 10) -> dict[str, Any]:
        """The first view of which `holds` is true."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                view = await self.view()
                if holds(view):
                    return view
            except (httpx.HTTPError, json.JSONDecodeError) as error:  # the router restarts
                view = {"error": repr(error)}
            assert time.monotonic() < deadline_s, json.dumps(view)
            await asyncio.sleep(0.1)

    def pid_of(self, deployment: str, replica_id: str | None = None) -> int:
        """The process of one running replica of a deployment."""
        from ray.serve.context import _get_global_client

        details = _get_global_client().get_serve_details()["applications"][self.app]["deployments"][deployment]["replicas"]
        return next(each["pid"] for each in details if each["state"] == "RUNNING" and replica_id in (None, each["replica_id"]))


def is_idle(model: dict[str, Any]) -> bool:
    """Nothing waits or runs, and every block is free: leased ones would not be."""
    return model["num_waiting"] == model["num_bookings"] == 0 and all(
        replica["num_running"] == 0 and replica["num_free_blocks"] == replica["num_blocks"] for replica in model["replicas"].values()
    )
