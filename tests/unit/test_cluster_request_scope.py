"""What surrounds a request: its id, its principal, and an observer that sees it begin and end exactly once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.generation.request_events import Abandoned, AnswerStarted, Begun, Ended, Failed, RequestEvent
from cluster.settings.gateway_config import GatewayConfig
from cluster.web.disconnect import ClientDisconnected
from cluster.web.principals import Principals
from cluster.web.request_scope import RequestFacts, RequestScope


class _Observer:
    def __init__(self) -> None:
        self.seen: list[RequestEvent] = []

    def begin(self, event: Begun) -> None:
        self.seen.append(event)

    def see(self, event: RequestEvent) -> None:
        self.seen.append(event)

    def end(self, event: Ended) -> None:
        self.seen.append(event)


class _Raising(_Observer):
    """Fails at every event."""

    def _fail(self, event: RequestEvent) -> None:
        raise KeyError("a bug of the observer")

    begin = see = end = _fail


class _Scoped:
    """`app` in its scope, with a clock that counts calls."""

    def __init__(self, app: ASGIApp, *, sends_request_id: bool = True, observe: type[_Observer] = _Observer) -> None:
        self._observer_class = observe
        self.observers: list[_Observer] = []
        self.sent: list[Message] = []
        times = iter(range(100))
        self._scope = RequestScope(
            app,
            principals=Principals(GatewayConfig()),
            observe=self._observe,
            sends_request_id=sends_request_id,
            clock=lambda: float(next(times)),
        )

    def _observe(self) -> _Observer:
        self.observers.append(self._observer_class())
        return self.observers[-1]

    async def call(self, *headers: tuple[bytes, bytes], kind: str = "http") -> list[type[RequestEvent]]:
        """Kinds of the events of one request, which are in order of time."""

        async def send(message: Message) -> None:
            self.sent.append(message)

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        await self._scope({"type": kind, "method": "POST", "path": "/p", "headers": list(headers)}, receive, send)
        return self.kinds()  # none of an observer that keeps none

    def kinds(self) -> list[type[RequestEvent]]:
        seen = self.observers[-1].seen
        assert [event.at_s for event in seen] == sorted(event.at_s for event in seen)
        return [type(event) for event in seen]


def answering(states: list[RequestFacts] | None = None) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if states is not None:
            states.append(scope["state"]["request"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": False})

    return app


def raising(error: BaseException) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    return app


async def test_answered_request_begins_starts_and_ends() -> None:
    states: list[RequestFacts] = []
    scoped = _Scoped(answering(states))
    assert await scoped.call((b"x-request-id", b"abc"), (b"x-tenant", b"acme")) == [Begun, AnswerStarted, Ended]
    begun, started, _ = scoped.observers[0].seen
    assert isinstance(begun, Begun)
    assert (begun.request_id, begun.method, begun.path, begun.tenant) == ("abc", "POST", "/p", "acme")
    assert isinstance(started, AnswerStarted)
    assert started.status == 200
    assert (states[0].request_id, states[0].principal.tenant) == ("abc", "acme")


@pytest.mark.parametrize(("sends_request_id", "headers"), [(True, [(b"x-request-id", b"abc")]), (False, [])])
async def test_id_goes_back_unless_the_proxy_sends_it(sends_request_id: bool, headers: list[Any]) -> None:
    scoped = _Scoped(answering(), sends_request_id=sends_request_id)
    await scoped.call((b"x-request-id", b"abc"))
    assert scoped.sent[0]["headers"] == headers


async def test_client_that_leaves_is_no_error_of_the_server() -> None:
    assert await _Scoped(raising(ClientDisconnected())).call() == [Begun, Abandoned, Ended]


async def test_cancelled_request_is_abandoned_and_stays_cancelled() -> None:
    scoped = _Scoped(raising(asyncio.CancelledError()))
    with pytest.raises(asyncio.CancelledError):
        await scoped.call()
    assert scoped.kinds() == [Begun, Abandoned, Ended]


async def test_request_that_raises_ends_all_the_same() -> None:
    scoped = _Scoped(raising(KeyError("bug")))
    with pytest.raises(KeyError):
        await scoped.call()
    assert scoped.kinds() == [Begun, Failed, Ended]


async def test_observer_that_raises_leaves_the_answer_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    scoped = _Scoped(answering(), observe=_Raising)
    await scoped.call()
    assert [message["type"] for message in scoped.sent] == ["http.response.start", "http.response.body"]
    assert [record.message for record in caplog.records] == [
        f"an observer failed at {kind}" for kind in ("Begun", "AnswerStarted", "Ended")
    ]


async def test_each_request_has_an_observer_of_its_own_and_what_is_not_http_has_none() -> None:
    scoped = _Scoped(answering())
    await scoped.call()
    await scoped.call()
    assert [len(observer.seen) for observer in scoped.observers] == [3, 3]
    lifespan = _Scoped(raising(KeyError("it passed")))
    with pytest.raises(KeyError):
        await lifespan.call(kind="lifespan")
    assert lifespan.observers == []
