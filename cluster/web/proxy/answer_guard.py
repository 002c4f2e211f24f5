"""Answers that Serve's own proxy makes: plain text for a timeout or an unknown path, nothing at all for a failure."""

from __future__ import annotations

import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.failures import Unavailable, answer_for
from cluster.protocols.dialect import Dialect
from cluster.protocols.dialects import dialect_of
from cluster.web.proxy.page_permissions import PagePermissions
from cluster.web.request_scope import REQUEST_ID_HEADER, request_id_of, with_request_id

logger = logging.getLogger(__name__)

_SERVES_OWN_PATHS = "/-/"
_MAX_TEXT_BYTES = 4096


class AnswerGuard:
    """ASGI middleware. Every error has the shape of its path's dialect, whoever makes it, and every answer a request id. Pages of other
    origins may read the errors made here if they may read the gateway's answers.

    A stream that breaks off behind it ends with an error event. What fails behind it fails alone: the proxy goes on. WebSockets are for
    other applications on the same Serve: a handshake that nobody accepts is an error like any other.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._permissions = PagePermissions()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._app(scope, receive, _telling_refusal(scope, send))
            return
        if scope["type"] != "http" or scope["path"].startswith(_SERVES_OWN_PATHS):
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope["headers"])
        scope = {**scope, "headers": with_request_id(scope["headers"], request_id)}  # else Serve would make one, or send any back
        if (origin := Headers(scope=scope).get("origin")) is not None:
            send = _permitting(send, self._permissions, origin)
        answer = _Answer(scope, receive, send, dialect_of(scope["path"]), request_id)
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            logger.exception("request %s failed in the proxy", request_id)
        await answer.finish()


def _telling_refusal(scope: Scope, send: Send) -> Send:
    """Of a WebSocket that is closed before it was accepted; ASGI alone would give it an empty 403."""
    has_answer = "websocket.http.response" not in scope.get("extensions", {})

    async def telling(message: Message) -> None:
        nonlocal has_answer
        if has_answer or message["type"] != "websocket.close":
            has_answer = True
            await send(message)
            return
        has_answer = True
        answer = answer_for(HTTPException(403, "No WebSocket is served at this path: send a plain HTTP request."), "")
        headers = {REQUEST_ID_HEADER: request_id_of(scope["headers"])}
        response = JSONResponse(dialect_of(scope["path"]).error_body(answer), status_code=answer.status, headers=headers)
        await send({"type": "websocket.http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "websocket.http.response.body", "body": response.body})

    return telling


def _permitting(send: Send, permissions: PagePermissions, origin: str) -> Send:
    async def permitting(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=list(message.get("headers", ())))
            permissions.note(origin, message["status"], headers)
            permissions.add_to(headers, origin)
            message = {**message, "headers": headers.raw}
        await send(message)

    return permitting


class _Answer:
    """One answer on its way to the client."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, dialect: Dialect, request_id: str) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._dialect = dialect
        self._request_id = request_id
        self._has_started = False
        self._is_complete = False
        self._is_stream = False
        self._refusal: Message | None = None  # the start of an answer that is told in other words
        self._text = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=[(name, value) for name, value in message.get("headers", ())])
            headers.setdefault(REQUEST_ID_HEADER, self._request_id)
            if message["status"] >= 400 and headers.get("content-type", "text/plain").startswith("text/plain"):
                self._refusal = message
                return
            self._has_started = True
            self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
            message = {**message, "headers": headers.raw}
        elif message["type"] == "http.response.body":
            if self._refusal is not None:
                self._text = (self._text + message.get("body", b""))[:_MAX_TEXT_BYTES]
                if not message.get("more_body", False):
                    await self._tell_refusal(self._refusal)
                return
            self._is_complete = not message.get("more_body", False)
        await self._send(message)

    async def finish(self) -> None:
        """Says that the answer broke off, where nobody has. A client that has gone is told nothing: the server drops it."""
        if self._is_complete:
            return
        if not self._has_started:
            await self._tell(HTTPException(500, f"The request failed in the server; its log has it under request {self._request_id}."))
        elif self._is_stream:
            answer = answer_for(Unavailable("The stream broke off: the gateway that served it has gone."), self._request_id)
            await self._send({"type": "http.response.body", "body": self._dialect.error_event(answer), "more_body": False})

    async def _tell_refusal(self, start: Message) -> None:
        headers = Headers(raw=[(name, value) for name, value in start.get("headers", ())])
        kept = {name: headers[name] for name in ("allow", "retry-after") if name in headers}
        text = " ".join(self._text.decode(errors="replace").split())
        await self._tell(HTTPException(start["status"], text, headers=kept))

    async def _tell(self, error: HTTPException) -> None:
        self._has_started = self._is_complete = True
        answer = answer_for(error, self._request_id)
        response = JSONResponse(self._dialect.error_body(answer), status_code=answer.status, headers=answer.headers)
        response.headers[REQUEST_ID_HEADER] = self._request_id
        await response(self._scope, self._receive, self._send)
