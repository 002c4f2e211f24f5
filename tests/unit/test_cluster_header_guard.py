"""The guard before Serve's proxy: headers that are not UTF-8 never reach it, nor those on which it would act."""

from __future__ import annotations

import json

import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.web.proxy.header_guard import HeaderGuard
from tests.unit.openai_schemas import check_schema


class _Proxy:
    """Remembers the scopes that it got."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)


async def _receive() -> Message:
    return {"type": "http.disconnect"}


async def guarded(headers: list[tuple[bytes, bytes]], kind: str = "http") -> tuple[_Proxy, list[Message]]:
    proxy, sent = _Proxy(), list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    await HeaderGuard(proxy)({"type": kind, "path": "/v1/completions", "headers": headers}, _receive, send)
    return proxy, sent


@pytest.mark.parametrize("headers", [[], [(b"x-tenant", b"acme")], [(b"x-tenant", "Żółć".encode())]])
async def test_headers_in_utf8_pass_untouched(headers: list[tuple[bytes, bytes]]) -> None:
    proxy, sent = await guarded(headers)
    assert [scope["headers"] for scope in proxy.scopes] == [headers]
    assert sent == []


@pytest.mark.parametrize("header", [(b"x-tenant", b"\xff"), (b"x-\xff", b"a")])
async def test_header_that_is_not_utf8_is_named_in_a_400(header: tuple[bytes, bytes]) -> None:
    proxy, (start, body) = await guarded([(b"accept", b"*/*"), header])
    assert proxy.scopes == []
    assert start["status"] == 400
    error = json.loads(body["body"])
    check_schema("ErrorResponse", error)
    assert error["error"]["code"] == "invalid_header"
    assert repr(header[0].decode("ascii", errors="replace")) in error["error"]["message"]


async def test_what_is_not_http_passes() -> None:
    proxy, _ = await guarded([(b"x", b"\xff")], kind="websocket")
    assert len(proxy.scopes) == 1


@pytest.mark.parametrize(
    "name",
    [
        b"x-request-timeout-seconds",
        b"X-Request-Timeout-Seconds",
        b"x-request-disconnect-disabled",
        b"serve_multiplexed_model_id",
        b"serve-multiplexed-model-id",
        b"x-serve-router-anything",
    ],
)
async def test_header_on_which_serve_acts_is_taken_out_and_no_other(name: bytes) -> None:
    others = [(b"accept", b"*/*"), (b"x-request-id", b"a"), (b"x-request-timeout", b"1"), (b"x-server", b"b")]
    proxy, sent = await guarded([*others[:2], (name, b"0.3"), *others[2:]])
    assert [scope["headers"] for scope in proxy.scopes] == [others]
    assert sent == []
