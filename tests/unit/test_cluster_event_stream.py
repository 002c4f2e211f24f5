"""A stream of events ends what feeds it, whenever its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from cluster.web.disconnect import ClientDisconnected
from cluster.web.event_stream import EventStream


class _Feed:
    """Chunks, and whether their generator was closed."""

    def __init__(self) -> None:
        self.is_closed = False

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        try:
            for chunk in (b"one", b"two", b"three"):
                yield chunk
        finally:
            self.is_closed = True


async def _never() -> Message:
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


async def _gone() -> Message:
    return {"type": "http.disconnect"}


async def test_stream_sends_what_was_begun_and_then_the_rest() -> None:
    feed, sent = _Feed(), []

    async def send(message: Message) -> None:
        sent.append(message)

    body = feed.chunks()
    await EventStream(await anext(body), body)({"type": "http"}, _never, send)
    assert sent[0]["status"] == 200
    assert [message["body"] for message in sent[1:]] == [b"one", b"two", b"three", b""]
    assert [message["more_body"] for message in sent[1:]] == [True, True, True, False]
    assert feed.is_closed


async def test_client_that_leaves_before_the_head_is_out_closes_the_body() -> None:
    feed = _Feed()

    async def blocked(message: Message) -> None:
        await asyncio.Event().wait()

    body = feed.chunks()
    stream = EventStream(await anext(body), body)
    with pytest.raises(ClientDisconnected):
        await stream({"type": "http"}, _gone, blocked)
    assert feed.is_closed
