"""Redeploys of a Serve config: a bad one takes nothing away, and streams of a model that is taken out end in time."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.deployed import Deployed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

APP = "redeployed"
DRAIN_S = 4.0


def application(*models: dict[str, Any]) -> dict[str, Any]:
    return {"name": APP, "route_prefix": f"/{APP}", "import_path": "cluster.app:build", "args": {"models": list(models)}}


def deploy(application: dict[str, Any] | None) -> None:
    """As Serve's REST API does."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    _get_global_client().deploy_apps(ServeDeploySchema(applications=[] if application is None else [application]))


async def wait_status(*wanted: str, timeout_s: float = 90.0) -> tuple[str, str]:
    """Status and message of the application once it has one of the wanted statuses."""
    from ray.serve.context import _get_global_client

    deadline_s = time.monotonic() + timeout_s
    while True:
        found = (await asyncio.to_thread(_get_global_client().get_serve_details))["applications"][APP]
        if found["status"] in wanted:
            return found["status"], found["message"]
        assert time.monotonic() < deadline_s, found
        await asyncio.sleep(0.2)


@pytest.fixture
def model(tiny_model_dir: Path) -> dict[str, Any]:
    engine = {"model": str(tiny_model_dir), "dtype": "float32", "kv_cache_bytes": 32 * 2**20, "num_threads": 1}
    return {"name": "kept", "num_cpus": 0.2, "drain_s": DRAIN_S, "engine": engine}


@pytest.fixture
def redeployed(local_ray: int) -> Iterator[Deployed]:
    yield Deployed(port=local_ray, app=APP, model="kept", prefix=f"/{APP}")
    deploy(None)


async def wait_healthy(http: httpx.AsyncClient, url: str) -> None:
    deadline_s = time.monotonic() + 60
    while True:
        health = await http.get(f"{url}/health")
        if health.status_code == 200:
            return
        assert time.monotonic() < deadline_s, health.text
        await asyncio.sleep(0.2)


async def test_redeploy_with_a_model_that_cannot_be_had_leaves_everything_as_it_is(redeployed: Deployed, model: dict[str, Any]) -> None:
    body = {"model": "kept", "prompt": "Once", "max_tokens": 5, "temperature": 0}
    async with httpx.AsyncClient(timeout=60) as http:
        deploy(application(model))
        assert await wait_status("RUNNING", "DEPLOY_FAILED") == ("RUNNING", "")
        await wait_healthy(http, redeployed.url)
        pid = redeployed.pid_of("replica-kept")
        before = (await http.post(f"{redeployed.url}/v1/completions", json=body)).json()["choices"]

        start_s = time.monotonic()
        deploy(application({**model, "engine": {**model["engine"], "model": "nobody/no-such-model"}}))
        _, message = await wait_status("DEPLOY_FAILED", "RUNNING")
        assert time.monotonic() - start_s < 45
        assert message.splitlines()[1:] == [message.splitlines()[-1]], "one line, and no traceback"
        assert "args: models[0] (kept): model 'nobody/no-such-model'" in message
        assert (await http.get(f"{redeployed.url}/health")).status_code == 200
        assert (await http.post(f"{redeployed.url}/v1/completions", json=body)).json()["choices"] == before
        assert psutil.pid_exists(pid), "the replica that answered still does"

        deploy(application(model))
        assert await wait_status("RUNNING", "DEPLOY_FAILED") == ("RUNNING", "")


async def test_stream_of_a_model_that_is_taken_out_ends_right_after_its_drain(
    redeployed: Deployed, model: dict[str, Any], tiny_model_dir: Path, tmp_path: Path
) -> None:
    long = shutil.copytree(tiny_model_dir, tmp_path / "long")
    settings = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 100_000}))  # an answer of a minute or more
    gone = {**model, "name": "gone", "engine": {**model["engine"], "model": str(long), "kv_cache_bytes": 64 * 2**20}}
    body = {"model": "gone", "prompt": "Once", "max_tokens": 90_000, "temperature": 0, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(timeout=120) as http:
        deploy(application(model, gone))
        assert await wait_status("RUNNING", "DEPLOY_FAILED") == ("RUNNING", "")
        await wait_healthy(http, redeployed.url)
        async with http.stream("POST", f"{redeployed.url}/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            deploy(application(model))
            start_s, last = time.monotonic(), ""
            async for line in lines:
                last = line or last
            elapsed_s = time.monotonic() - start_s
        assert "was taken out of the configuration" in last
        assert elapsed_s < DRAIN_S + 40, "it waited for a replica that never comes: failover.replica_timeout_s is two minutes"
        deadline_s = time.monotonic() + 30
        while "gone" in (shown := (await http.get(f"{redeployed.url}/debug/router")).json()):
            assert time.monotonic() < deadline_s, shown
            await asyncio.sleep(0.3)
