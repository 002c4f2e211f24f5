"""Guards before Serve's own proxy, which decodes some headers as UTF-8 and answers a plain 500 when one is not.

Serve's proxy calls `middlewares` when RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it, as `make serve` does.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.failures import BadRequest, answer_for
from cluster.protocols.dialects import DEFAULT_DIALECT
from cluster.web.body_ahead import BodyAhead
from replicas.process.heap import freeze_heap


class HeaderGuard:
    """ASGI middleware. A request whose headers are not UTF-8 gets a 400; all others pass untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        bad = next((name for name, value in scope.get("headers", ()) if not (_is_utf8(name) and _is_utf8(value))), None)
        if bad is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        shown = bad.decode("ascii", errors="replace")[:100]
        answer = answer_for(BadRequest(f"The header {shown!r} holds bytes that are not UTF-8.", code="invalid_header"), "")
        await JSONResponse(DEFAULT_DIALECT.error_body(answer), status_code=answer.status)(scope, receive, send)


def middlewares() -> list[Middleware]:
    """For Serve's proxy, which asks once, when it starts."""
    freeze_heap()
    return [Middleware(HeaderGuard), Middleware(BodyAhead)]


def _is_utf8(value: bytes) -> bool:
    if value.isascii():
        return True
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
