"""Cross-origin requests of browsers (https://fetch.spec.whatwg.org/#http-cors-protocol)."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.failures import answer_for
from cluster.protocols.dialects import dialect_of
from cluster.settings.cors import ANY_ORIGIN, CorsRules

_METHODS = "GET, POST"
_EXPOSED = "Retry-After, X-Request-Id"


class Cors:
    """ASGI middleware. Answers preflights itself; every other answer, errors too, tells the browser whether its page may read it.

    Pages send keys in `Authorization`, so cookies are never asked for.
    """

    def __init__(self, app: ASGIApp, *, rules: CorsRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        allowed = self._allowed(headers.get("origin"))

        async def send_with_permission(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._permit(MutableHeaders(scope=message), allowed)
            await send(message)

        is_preflight = scope["method"] == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers
        app = self._preflight(scope["path"], headers, allowed) if is_preflight else self._app
        await app(scope, receive, send_with_permission)

    def _allowed(self, origin: str | None) -> str | None:
        """The value of Access-Control-Allow-Origin, if it has one."""
        if ANY_ORIGIN in self._rules.origins:
            return ANY_ORIGIN
        return origin if origin in self._rules.origins else None

    def _permit(self, headers: MutableHeaders, allowed: str | None) -> None:
        if ANY_ORIGIN not in self._rules.origins:
            headers.add_vary_header("Origin")  # whoever asks: a cache must not give the answer to another page
        if allowed is not None:
            headers["Access-Control-Allow-Origin"] = allowed
            headers["Access-Control-Expose-Headers"] = _EXPOSED

    def _preflight(self, path: str, headers: Headers, allowed: str | None) -> Response:
        if allowed is None:
            error = HTTPException(403, "Pages of this origin may not call this server: gateway.cors.origins does not name it.")
            answer = answer_for(error, "")
            return JSONResponse(dialect_of(path).error_body(answer), status_code=answer.status)
        granted = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": str(self._rules.max_age_s)}
        asked = headers.get("access-control-request-headers")
        if asked is not None:
            granted |= {"Access-Control-Allow-Headers": asked, "Vary": "Access-Control-Request-Headers"}
        return Response(status_code=204, headers=granted)
