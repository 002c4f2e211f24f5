"""A replica of two ranks on Ray: chat works, and killing either rank under load costs a pause and leaves no process behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import AsyncOpenAI

from tests.integration.deployed import Deployed

logger = logging.getLogger(__name__)

APP, MODEL = "divided", "tiny-divided"
RECOVERED_S = 60.0
TITLES = {0: f"ray::ServeReplica:{APP}:replica-", 1: "ray::_RankActor"}  # rank -> how Ray names its process
LONG: dict[str, Any] = {"max_tokens": 150, "temperature": 0, "extra_body": {"ignore_eos": True}}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def url(deployed: Deployed, tiny_model_dir: Path) -> Iterator[str]:
    from ray import serve

    from cluster.app import build

    engine = {"model": str(tiny_model_dir), "dtype": "float32", "kv_cache_bytes": 32 * 2**20, "tensor_parallel_size": 2, "num_threads": 1}
    serve.run(build({"models": [{"name": MODEL, "num_cpus": 0.25, "engine": engine}]}), name=APP, route_prefix="/divided")
    yield f"{deployed.url}/divided"
    serve.delete(APP)
    until_s = time.monotonic() + RECOVERED_S
    while _pids(0) or _pids(1):
        assert time.monotonic() < until_s, "a deleted application left a rank"
        time.sleep(0.1)


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=90) as made:
        yield made


def _pids(rank: int) -> set[int]:
    """Processes that are this rank of some replica of the application, by their titles."""
    found = set()
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and (process.info["cmdline"] or [""])[0].startswith(TITLES[rank]):
            found.add(process.pid)
    return found


async def _streamed(client: AsyncOpenAI, prompt: str, started: asyncio.Event | None = None) -> str:
    text = ""
    async for chunk in await client.completions.create(model=MODEL, prompt=prompt, stream=True, **LONG):
        text += chunk.choices[0].text
        if started is not None:
            started.set()
    return text


async def test_chat_with_a_replica_of_two_ranks(client: AsyncOpenAI) -> None:
    assert (len(_pids(0)), len(_pids(1))) == (1, 1)
    messages: Any = [{"role": "user", "content": "Tell me about rivers."}]
    whole = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=40, temperature=0)
    stream = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=40, temperature=0, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content


@pytest.mark.parametrize("rank", [0, 1])
async def test_rank_killed_under_load_is_a_pause_and_all_ranks_start_again(client: AsyncOpenAI, rank: int) -> None:
    expected = await _streamed(client, "A long tale")
    before = _pids(0) | _pids(1)
    assert len(before) == 2
    started = asyncio.Event()
    streams = [asyncio.create_task(_streamed(client, "A long tale", started)) for _ in range(4)]
    await started.wait()
    (pid,) = _pids(rank)
    os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()
    assert await asyncio.gather(*streams) == [expected] * 4
    logger.info("rank %d killed: its streams ended %.1f s later", rank, time.monotonic() - killed_s)
    while True:
        ranks = _pids(0), _pids(1)
        if [len(pids) for pids in ranks] == [1, 1] and not before & (ranks[0] | ranks[1]):
            break
        assert time.monotonic() < killed_s + RECOVERED_S, f"ranks {ranks}, before {before}"
        await asyncio.sleep(0.1)
