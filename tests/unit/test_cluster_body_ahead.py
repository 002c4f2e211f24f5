import asyncio
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from cluster.failures import BodyTooLarge
from cluster.web.body_ahead import MAX_BODY_BYTES, BodyAhead, BodyTaken, body_sent_ahead
from cluster.web.request_body import read_body

DISCONNECT: Message = {"type": "http.disconnect"}


def part(body: bytes, more_body: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more_body}


class Behind:
    """The application behind the middleware: keeps the scope, and reads what there is until the client has gone."""

    def __init__(self) -> None:
        self.scope: Scope = {}
        self.messages: list[Message] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        while not self.messages or self.messages[-1] != DISCONNECT:
            self.messages.append(await receive())


async def no_answer(message: Message) -> None:
    raise AssertionError(f"nobody answers here: {message}")


def passed(messages: list[Message], method: str = "POST", kind: str = "http") -> Behind:
    behind, left = Behind(), iter(messages)

    async def receive() -> Message:
        return next(left)

    asyncio.run(BodyAhead(behind)({"type": kind, "method": method, "headers": []}, receive, no_answer))
    return behind


@pytest.mark.parametrize("messages", [[part(b"abcd")], [part(b"ab", True), part(b"", True), part(b"cd")], [part(b"")]])
def test_body_ahead_small_body_is_in_the_scope_and_can_be_read_again(messages: list[Message]) -> None:
    behind = passed([*messages, DISCONNECT])
    assert body_sent_ahead(behind.scope) == b"".join(message["body"] for message in messages)
    assert behind.messages == [*messages, DISCONNECT]


@pytest.mark.parametrize("messages", [[part(b"x" * (MAX_BODY_BYTES + 1))], [part(b"x" * MAX_BODY_BYTES, True), part(b"y")]])
def test_body_ahead_large_body_has_to_be_read(messages: list[Message]) -> None:
    behind = passed([*messages, DISCONNECT])
    assert body_sent_ahead(behind.scope) is None
    assert behind.messages == [*messages, DISCONNECT]


def test_body_ahead_body_that_the_gateway_has_to_fetch_is_not_waited_for() -> None:
    header = (b"content-length", str(MAX_BODY_BYTES + 1).encode())
    has_begun = False

    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal has_begun
        has_begun = True

    async def receive() -> Message:
        raise AssertionError("whoever takes the body reads it")

    asyncio.run(BodyAhead(behind)({"type": "http", "method": "POST", "headers": [header]}, receive, no_answer))
    assert has_begun


def test_body_ahead_client_that_leaves_amid_its_body_is_seen_as_such() -> None:
    behind = passed([part(b"ab", True), DISCONNECT])
    assert body_sent_ahead(behind.scope) is None
    assert behind.messages == [part(b"ab", True), DISCONNECT]


@pytest.mark.parametrize(("method", "kind"), [("GET", "http"), ("POST", "websocket")])
def test_body_ahead_other_requests_pass_untouched(method: str, kind: str) -> None:
    behind = passed([part(b"ab"), DISCONNECT], method, kind)
    assert body_sent_ahead(behind.scope) is None
    assert behind.messages == [part(b"ab"), DISCONNECT]


def read(scope: dict[str, Any], max_bytes: int) -> bytes:
    async def receive() -> Message:
        raise AssertionError("the body is there already")

    return asyncio.run(read_body(Request({"type": "http", "method": "POST", "headers": [], **scope}, receive), max_bytes))


def test_read_body_sent_ahead_is_returned_without_reading() -> None:
    assert read(passed([part(b"abcd"), DISCONNECT]).scope, max_bytes=4) == b"abcd"


def test_read_body_sent_ahead_over_the_limit_is_refused() -> None:
    with pytest.raises(BodyTooLarge):
        read(passed([part(b"abcd"), DISCONNECT]).scope, max_bytes=3)


class ServeReceive:
    """As Serve's own: whatever asks the proxy stands in an attribute, and is called from a task that has not begun yet."""

    def __init__(self) -> None:
        self.num_fetches = 0
        self._receive_asgi_messages: Any = self._fetch

    async def _fetch(self, metadata: object) -> bytes:
        self.num_fetches += 1
        return b""

    async def fetch_until_disconnect(self) -> None:
        await self._receive_asgi_messages(None)

    async def __call__(self) -> Message:
        raise AssertionError("nothing is read here")


async def served(scope: Scope) -> int:
    receive = ServeReceive()
    fetching = asyncio.create_task(receive.fetch_until_disconnect())

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0)

    await BodyTaken(endpoint)(scope, receive, no_answer)
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    return receive.num_fetches


def test_body_taken_nothing_is_fetched_of_a_body_sent_ahead() -> None:
    assert asyncio.run(served(passed([part(b"abcd"), DISCONNECT]).scope)) == 0


def test_body_taken_other_bodies_are_fetched() -> None:
    assert asyncio.run(served({"type": "http"})) == 1
