"""An HTTP answer that streams server-sent events (WHATWG HTML, section 9.2) and always closes what feeds it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.web.disconnect import run_until_disconnect


class EventStream(Response):
    """Sends `first`, then the chunks of `body`, which must turn its own errors into events.

    However the sending ends (done, client gone, cancelled), `body` is closed before this returns. It must have begun: closing a
    generator that has not runs none of its cleaning up.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, body: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None) -> None:
        """`first` is what `body` has yielded already."""
        self._first = first
        self._body = body
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._body):
            await run_until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for chunk in self._body:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
