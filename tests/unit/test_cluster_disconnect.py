"""Work that ends with its client."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from cluster.web.disconnect import ClientDisconnected, run_until_disconnect


class _Client:
    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}


async def test_result_of_the_work_comes_back() -> None:
    async def work() -> int:
        return 5

    assert await run_until_disconnect(_Client().receive, work()) == 5


async def test_error_of_the_work_comes_back() -> None:
    async def work() -> None:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        await run_until_disconnect(_Client().receive, work())


async def test_leaving_client_ends_the_work_before_the_call_returns() -> None:
    client, ended = _Client(), asyncio.Event()

    async def work() -> None:
        try:
            client.left.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(ClientDisconnected):
        await run_until_disconnect(client.receive, work())
    assert ended.is_set()


async def test_cancelling_the_call_ends_the_work() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    call = asyncio.create_task(run_until_disconnect(_Client().receive, work()))
    await started.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended.is_set()
