"""Clients that leave: their requests are gone from queue, prefill or decode at once, and no block stays held."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.unit.fake_engine import EchoEngine
from tests.unit.http_server import serving
from tests.unit.in_process_cluster import MODEL, InProcessCluster


@pytest.fixture
async def port(cluster: InProcessCluster) -> AsyncIterator[int]:
    async with serving(cluster.app) as bound:
        yield bound


async def post(port: int, *, stream: bool, prompt: str = "one two three", n: int = 1) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends an endless request and returns the connection."""
    body = json.dumps({"model": MODEL, "prompt": prompt, "ignore_eos": True, "max_tokens": 1900, "stream": stream, "n": n}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


async def wait_in_decode(engine: EchoEngine, count: int) -> None:
    """Waits for `count` requests at the closed gate, and lets them get into the middle of their answers."""
    async with asyncio.timeout(30):
        while len(engine.scheduler.waiting) < count:
            await asyncio.sleep(0.002)
        engine.close_gate_after = 20 * count
        engine.gate.set()
        while engine.gate.is_set():
            await asyncio.sleep(0.002)
    assert len(engine.scheduler.running) == count


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_disconnect_in_decode_frees_every_block(cluster: InProcessCluster, port: int, stream: bool, n: int) -> None:
    engine = cluster.replicas[0].engine
    engine.gate.clear()
    _, writer = await post(port, stream=stream, n=n)
    await wait_in_decode(engine, n)
    writer.close()
    await cluster.wait_idle()
    assert engine.stats().num_cancelled == n
    assert cluster.records[-1].status == 499


async def wait_router(cluster: InProcessCluster, is_so: Callable[[dict[str, Any]], bool]) -> None:
    """Waits until what the router says of the model is so."""
    async with asyncio.timeout(30):
        while not is_so((await cluster.backend.describe_router()).get(MODEL, {"num_waiting": 0, "num_bookings": 0})):
            await asyncio.sleep(0.002)  # nothing tells of the router's view


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_while_queued_leaves_the_queue(cluster: InProcessCluster, port: int, stream: bool) -> None:
    engine = cluster.replicas[0].engine
    engine.gate.clear()
    writers = [(await post(port, stream=stream))[1] for _ in range(40)]  # most are sent on, for 16 may run; the rest queues
    await wait_router(
        cluster, lambda described: described["num_waiting"] > 0 and described["num_waiting"] + described["num_bookings"] == 40
    )
    for writer in writers:
        writer.close()
    await wait_router(cluster, lambda described: described["num_waiting"] == 0)
    engine.gate.set()
    await cluster.wait_idle()
    await wait_router(cluster, lambda described: described["num_bookings"] == 0)
    assert len(cluster.backend.routed) == 40
    assert len(cluster.backend.sent) < 40, "who left the queue was never sent to a replica"
    assert engine.stats().num_finished == 0
    async with asyncio.timeout(30):
        while len(cluster.records) < 40:  # a record comes after the last event of its request
            await asyncio.sleep(0.002)
    assert [record.status for record in cluster.records] == [499] * 40


async def test_streams_closed_at_random_moments_hold_no_block(cluster: InProcessCluster, port: int) -> None:
    dice = random.Random(5)

    async def one() -> None:
        reader, writer = await post(port, stream=True, prompt="word " * dice.randint(1, 100))
        try:
            if (num_events := dice.randint(-1, 30)) >= 0:  # else it leaves at once
                await reader.readuntil(b"\r\n\r\n")
            for _ in range(num_events):
                await reader.readuntil(b"\n\n")
        except asyncio.IncompleteReadError:  # tokens that come together are one event, so the answer may have fewer
            pass
        finally:
            writer.close()

    await asyncio.gather(*(one() for _ in range(32)))
    await cluster.wait_idle()


async def test_slow_reader_does_not_stop_the_others(cluster: InProcessCluster, port: int) -> None:
    _, slow = await post(port, stream=True)  # never read
    reader, fast = await post(port, stream=True)
    fast_bytes = 0
    async with asyncio.timeout(30):
        while b"[DONE]" not in (data := await reader.read(65536)):
            fast_bytes += len(data)
    assert fast_bytes > 0
    slow.close()
    fast.close()
    await cluster.wait_idle()
