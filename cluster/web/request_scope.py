"""The surroundings of every request: its id in and out, who asks, and who watches."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.generation.request_events import Abandoned, AnswerStarted, Begun, Ended, Failed, RequestEvent, RequestObserver
from cluster.principal import Principal
from cluster.web.disconnect import ClientDisconnected
from cluster.web.principals import Principals

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
_ID_NAME = REQUEST_ID_HEADER.encode()
_SAFE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """Facts and connections of one request from its head to its last byte."""

    request_id: str
    principal: Principal
    clock: Callable[[], float]
    emit: Callable[[RequestEvent], None]
    """Tells the request's observer."""


class RequestScope:
    """ASGI middleware. Gives each request its state and an observer, which sees it end when the last byte is out."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        principals: Principals,
        observe: Callable[[], RequestObserver],
        sends_request_id: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`observe` makes the observer of one request.

        `sends_request_id` is off under Serve, whose proxy puts the id into every answer itself.
        """
        self._app = app
        self._principals = principals
        self._observe = observe
        self._sends_request_id = sends_request_id
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        observer = _GuardedObserver(self._observe())
        state = RequestFacts(
            request_id=request_id_of(scope["headers"]),
            principal=self._principals.of(dict(scope["headers"])),
            clock=self._clock,
            emit=observer.see,
        )
        scope.setdefault("state", {})["request"] = state
        observer.begin(
            Begun(
                at_s=self._clock(), request_id=state.request_id, method=scope["method"], path=scope["path"], tenant=state.principal.tenant
            )
        )

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                observer.see(AnswerStarted(at_s=self._clock(), status=message["status"]))
                if self._sends_request_id:
                    MutableHeaders(scope=message)[REQUEST_ID_HEADER] = state.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnected:
            observer.see(Abandoned(at_s=self._clock()))
        except Exception:
            observer.see(Failed(at_s=self._clock(), code="internal_error"))
            raise
        except asyncio.CancelledError:  # how Serve tells of the same
            observer.see(Abandoned(at_s=self._clock()))
            raise
        finally:
            observer.end(Ended(at_s=self._clock()))


class _GuardedObserver:
    """A RequestObserver whose faults are logged and never reach the request."""

    def __init__(self, observer: RequestObserver) -> None:
        self._observer = observer

    def begin(self, event: Begun) -> None:
        self._tell(self._observer.begin, event)

    def see(self, event: RequestEvent) -> None:
        self._tell(self._observer.see, event)

    def end(self, event: Ended) -> None:
        self._tell(self._observer.end, event)

    def _tell(self, told: Callable[[Any], None], event: RequestEvent) -> None:
        try:
            told(event)
        except Exception:
            logger.exception("an observer failed at %s", type(event).__name__)


def state_of(request: Request) -> RequestFacts:
    state = request.state.request
    assert isinstance(state, RequestFacts)
    return state


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's own id when it is safe to log and to send back, else a new one; two ids are none. `headers` as ASGI gives them."""
    given = b",".join(value for name, value in headers if name == _ID_NAME).decode("latin-1")
    return given if _SAFE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


def with_request_id(headers: Iterable[tuple[bytes, bytes]], request_id: str) -> list[tuple[bytes, bytes]]:
    """The headers with this id and no other."""
    return [*((name, value) for name, value in headers if name != _ID_NAME), (_ID_NAME, request_id.encode())]
