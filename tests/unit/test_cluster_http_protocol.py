"""Raw bytes on a connection: offers of other protocols, requests one behind the other, and what is no HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from tests.unit.http_server import serving
from tests.unit.openai_schemas import check_schema


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with what it got."""
    if scope["type"] != "http":
        return
    request = Request(scope, receive)
    body = (await request.body()).decode()
    names = sorted(request.headers.keys())
    await JSONResponse({"method": request.method, "path": request.url.path, "body": body, "names": names})(scope, receive, send)


@pytest.fixture
async def connection() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with serving(_echo) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        yield reader, writer
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    """Status and JSON body of the next answer."""
    async with asyncio.timeout(10):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        (length,) = [line.split(":")[1] for line in head.split("\r\n") if line.startswith("content-length")]
        return int(head.split()[1]), json.loads(await reader.readexactly(int(length)))


def post(body: str, *headers: str, chunked: bool = False) -> bytes:
    size = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    chunk = f"{len(body):x}\r\n{body}\r\n" if body else ""
    sent = f"{chunk}0\r\n\r\n" if chunked else body
    return "\r\n".join(["POST /p?q=1 HTTP/1.1", "Host: x", *headers, size, "", sent]).encode()


JAVA = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA")
OFFERS = [
    JAVA,
    ("Upgrade: h2c", "Connection: keep-alive, upgrade"),
    ("Connection: UPGRADE", "Upgrade: TLS/1.0, HTTP/2.0"),
    ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="),
    ("Connection: Upgrade", "Upgrade: "),
    ("Upgrade: h2c",),
    ("Connection: keep-alive", "Connection: Upgrade", "Upgrade: h2c", "Expect: 100-continue"),
]


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("chunked", [False, True])
async def test_offer_of_another_protocol_is_passed_over_and_the_connection_goes_on(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], offer: tuple[str, ...], chunked: bool
) -> None:
    reader, writer = connection
    for body in ("first", "", "x" * 100_000):
        writer.write(post(body, *offer, chunked=chunked))
        if any("100-continue" in header for header in offer):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        status, got = await answer(reader)
        assert (status, got["method"], got["path"], got["body"]) == (200, "POST", "/p", body)
    writer.write(post("plain"))
    assert (await answer(reader))[1]["body"] == "plain"


async def test_requests_with_offers_may_follow_each_other_in_pieces_of_any_size(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    reader, writer = connection
    bodies = ["one", "two", "three", ""]
    sent = b"".join(post(body, *JAVA) for body in bodies)
    for size in (1, 7, 61, len(sent)):
        for begin in range(0, len(sent), size):
            writer.write(sent[begin : begin + size])
            await asyncio.sleep(0)
        assert [(await answer(reader))[1]["body"] for _ in bodies] == bodies


async def test_thousands_of_requests_with_offers_in_one_piece_are_served(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """More than a stack is deep."""
    reader, writer = connection
    writer.write(post("", "Connection: upgrade", "Upgrade: a") * 3000)
    for _ in range(3000):
        assert (await answer(reader))[0] == 200


async def test_application_sees_nothing_of_the_offer(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    reader, writer = connection
    writer.write(post("a", "X-Kept: 1", *JAVA, "Accept: */*"))
    assert (await answer(reader))[1]["names"] == ["accept", "content-length", "host", "x-kept"]


@pytest.mark.parametrize(
    "sent",
    [
        b"what\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a client that speaks TLS
        b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_a_400_in_the_shape_of_the_api(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], sent: bytes
) -> None:
    reader, writer = connection
    writer.write(sent)
    status, body = await answer(reader)
    assert status == 400
    check_schema("ErrorResponse", body)
    assert body["error"]["code"] == "invalid_http"
    assert await reader.read() == b""


@pytest.mark.parametrize("keep_alive", ["", "Connection: keep-alive\r\n"])
@pytest.mark.parametrize(("path", "length"), [("/stream", None), ("/whole", b"8")])
async def test_answer_to_http_1_0_has_no_chunks_and_ends_with_the_connection(keep_alive: str, path: str, length: bytes | None) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [] if length is None else [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in (b"one", b"", b"two", b"34"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.0\r\n{keep_alive}\r\n".encode())
        async with asyncio.timeout(10):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert body == b"onetwo34"
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()


async def test_application_that_fails_before_http_1_0_got_an_answer_is_a_500() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("boom")

    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.read()).startswith(b"HTTP/1.1 500 ")
        writer.close()
