"""Sends a small body along with its request from Serve's proxy to the gateway.

Serve hands the gateway a request without its body; reading that is a call from the gateway back to the proxy, one of Ray's own:
3 ms on an idle machine, 15 ms with 16 clients. Here the proxy waits for the body and puts it into the request's scope.
"""

from __future__ import annotations

from collections import deque

from starlette.types import ASGIApp, Message, Receive, Scope, Send

SCOPE_KEY = "manta.body"
MAX_BODY_BYTES = 2**18
"""Of a body that goes ahead. A larger one is fetched, chunk by chunk, by whoever takes it."""


class BodyAhead:
    """ASGI middleware before Serve's proxy. What it has read is there to be read again, so that any application may stand behind."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        read: deque[Message] = deque()
        size_bytes = 0
        while size_bytes <= MAX_BODY_BYTES:
            message = await receive()
            read.append(message)
            if message["type"] != "http.request":
                break
            size_bytes += len(message.get("body", b""))
            if not message.get("more_body", False):
                if size_bytes <= MAX_BODY_BYTES:
                    scope = {**scope, SCOPE_KEY: b"".join(part.get("body", b"") for part in read)}
                break

        async def receive_again() -> Message:
            return read.popleft() if read else await receive()

        await self._app(scope, receive_again, send)


def body_sent_ahead(scope: Scope) -> bytes | None:
    """The whole body of a request that passed `BodyAhead`; None when it has to be read."""
    body = scope.get(SCOPE_KEY)
    return body if isinstance(body, bytes) else None
