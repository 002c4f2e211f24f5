"""HTTP/1 as uvicorn speaks it, for clients that offer to go on in another protocol, and for those of HTTP/1.0."""

from __future__ import annotations

import json
import re
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cluster.failures import BadRequest, answer_for
from cluster.protocols.dialects import DEFAULT_DIALECT

_WEBSOCKET_KEY = re.compile(rb"[A-Za-z0-9+/]{21}[AQgw]==")  # 16 bytes in base64


class HttpProtocol(HttpToolsProtocol):  # type: ignore[misc]
    """Passes over every offer but a valid one of a WebSocket (RFC 9110, section 7.8): the request is served as if it had none.

    Java's clients offer `Upgrade: h2c` with each request. uvicorn's parser (0.54) stops after the head of such a request and takes its
    body for the other protocol; so here the same head, without the offer, goes through a new parser, with what follows it.
    """

    parser: Any  # httptools' own, without types

    def _should_upgrade(self) -> bool:
        return self.parser.get_method() == b"GET" and bool(super()._should_upgrade()) and self._is_handshake_whole

    @property
    def _is_handshake_whole(self) -> bool:
        """RFC 6455, section 4.1. uvicorn answers any other in plain text."""
        named = dict(self.headers)
        return named.get(b"sec-websocket-version") == b"13" and _WEBSOCKET_KEY.fullmatch(named.get(b"sec-websocket-key", b"")) is not None

    @property
    def _is_offer_passed_over(self) -> bool:
        return self.parser.should_upgrade() and not self._should_upgrade()

    def on_headers_complete(self) -> None:
        if not self._is_offer_passed_over:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._is_offer_passed_over:
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        left: bytes | None = data
        while left is not None:  # once more for each offer in it
            left = self._read(left)

    def _read(self, data: bytes) -> bytes | None:
        """Reads up to the end of the first head with an offer; the bytes to read in its place, if there is one that is passed over."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            elif self.parser.get_method() == b"CONNECT":
                self.send_400_response("CONNECT is not supported: this server is no proxy.")
            else:
                head = self._head_without_offer()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
                return head + data[stop.args[0] :]
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        return None

    def _head_without_offer(self) -> bytes:
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(option for option in options if option.lower() not in (b"upgrade", b"http2-settings"))
            if value and name not in (b"upgrade", b"http2-settings"):
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:
        super()._start_asgi_task(cycle, _until_closed(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def send_400_response(self, msg: str) -> None:
        """uvicorn's own, in the shape of an API error."""
        body = json.dumps(DEFAULT_DIALECT.error_body(answer_for(BadRequest(msg, code="invalid_http"), ""))).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


def _until_closed(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """The application for a client of HTTP/1.0, which knows no chunks: a stream ends with its connection (RFC 9112, section 6.3).

    uvicorn (0.54) chunks every body whose length it is not told, so each part is told to be as long as it is.
    """

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_full(message: Message) -> None:
            if message["type"] == "http.response.start":
                cycle.chunked_encoding = False
            elif message["type"] == "http.response.body":
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_in_full)

    return run
