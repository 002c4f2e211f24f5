"""Headers on which Serve's own proxy acts, for itself: clients have no say there."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.failures import BadRequest, answer_for
from cluster.protocols.dialects import dialect_of

# Ray 2.60, by `ray/serve/_private/http_util.py`: a time after which it cuts the answer off, whether it looks after the client, and the
# choice of a replica by model.
_ACTED_UPON = frozenset(["x-request-timeout-seconds", "x-request-disconnect-disabled", "serve-multiplexed-model-id"])
_ACTED_UPON_PREFIX = "x-serve-"


class HeaderGuard:
    """ASGI middleware. Takes Serve's own headers out of a request. One whose headers are not UTF-8 gets a 400: the proxy decodes them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        bad = next((name for name, value in headers if not (_is_utf8(name) and _is_utf8(value))), None)
        if bad is not None:
            shown = bad.decode("ascii", errors="replace")[:100]
            answer = answer_for(BadRequest(f"The header {shown!r} holds bytes that are not UTF-8.", code="invalid_header"), "")
            await JSONResponse(dialect_of(scope["path"]).error_body(answer), status_code=answer.status)(scope, receive, send)
            return
        if any(_is_acted_upon(name) for name, _ in headers):
            scope = {**scope, "headers": [(name, value) for name, value in headers if not _is_acted_upon(name)]}
        await self._app(scope, receive, send)


def _is_acted_upon(name: bytes) -> bool:
    """Serve takes underscores for hyphens in some of them."""
    text = name.decode().lower().replace("_", "-")
    return text in _ACTED_UPON or text.startswith(_ACTED_UPON_PREFIX)


def _is_utf8(value: bytes) -> bool:
    if value.isascii():
        return True
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
