"""The guard around Serve's proxy: its plain answers in the shape of the API, its failures as answers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.web.proxy.answer_guard import AnswerGuard
from tests.unit.openai_schemas import check_schema

Proxy = Callable[[Scope, Receive, Send], Awaitable[None]]


def start(status: int, content_type: str = "text/plain", *more: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [[b"content-type", content_type.encode()], *more]}


def part(body: bytes, more_body: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more_body}


def sending(*messages: Message, then: Exception | None = None) -> Proxy:
    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)
        if then is not None:
            raise then

    return proxy


async def _receive() -> Message:
    return {"type": "http.disconnect"}


async def answered(proxy: Proxy, path: str = "/v1/chat/completions", headers: list[tuple[bytes, bytes]] | None = None) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await AnswerGuard(proxy)({"type": "http", "method": "POST", "path": path, "headers": headers or []}, _receive, send)
    return sent


def check_refusal(sent: list[Message], status: int) -> tuple[dict[str, Any], dict[bytes, bytes]]:
    """The error and the headers of a whole answer."""
    head, body = sent
    assert (head["status"], body.get("more_body", False)) == (status, False)
    found = json.loads(body["body"])
    check_schema("ErrorResponse", found)
    headers = dict(head["headers"])
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"content-length"] == str(len(body["body"])).encode()
    assert b"x-request-id" in headers
    return found["error"], headers


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, "invalid_request_error", None),
        (404, "invalid_request_error", "unknown_url"),
        (408, "service_unavailable_error", "request_timeout"),
        (413, "invalid_request_error", "body_too_large"),
        (415, "invalid_request_error", None),
        (429, "rate_limit_error", "rate_limit_exceeded"),
        (500, "server_error", "internal_error"),
        (502, "server_error", None),
        (503, "service_unavailable_error", "unavailable"),
    ],
)
async def test_plain_error_gets_the_shape_of_the_api(status: int, kind: str, code: str | None) -> None:
    error, headers = check_refusal(
        await answered(
            sending(start(status, "text/plain; charset=utf-8", (b"retry-after", b"7")), part(b"Request x ", True), part(b"timed\nout"))
        ),
        status,
    )
    assert error == {"message": "Request x timed out", "type": kind, "param": None, "code": code}
    assert headers[b"retry-after"] == b"7"


async def test_error_of_the_gateway_passes_as_it_is() -> None:
    messages = [start(400, "application/json", (b"x-request-id", b"a")), part(b'{"error": {}}')]
    head, body = await answered(sending(*messages))
    assert (head["status"], dict(head["headers"]), body) == (
        400,
        {b"content-type": b"application/json", b"x-request-id": b"a"},
        messages[1],
    )


@pytest.mark.parametrize("then", [None, RuntimeError("boom")])
async def test_proxy_that_answers_nothing_is_a_500_with_the_id_of_its_log(then: Exception | None, caplog: pytest.LogCaptureFixture) -> None:
    error, headers = check_refusal(await answered(sending(then=then), headers=[(b"x-request-id", b"mine")]), 500)
    assert error["code"] == "internal_error"
    assert "mine" in error["message"]
    assert headers[b"x-request-id"] == b"mine"
    assert ("boom" in caplog.text) == (then is not None)


async def test_request_without_an_id_gets_one_that_everybody_sees() -> None:
    seen: list[bytes] = []

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(dict(scope["headers"])[b"x-request-id"])
        await sending(start(200), part(b"ok"))(scope, receive, send)

    first, second = await answered(proxy), await answered(proxy)
    assert [dict(head["headers"])[b"x-request-id"] for head, _ in (first, second)] == seen
    assert seen[0] != seen[1]


@pytest.mark.parametrize("given", [("mine",), ("a b",), ("a" * 129,), ("",), ("日本",), ("<script>",), ("a", "b")])
async def test_everybody_sees_one_id_the_clients_own_if_it_is_safe(given: tuple[str, ...]) -> None:
    seen: list[list[bytes]] = []

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append([value for name, value in scope["headers"] if name == b"x-request-id"])
        await sending(start(200), part(b"ok"))(scope, receive, send)

    head, _ = await answered(proxy, headers=[(b"x-request-id", value.encode()) for value in given])
    assert seen == [[dict(head["headers"])[b"x-request-id"]]]
    assert (seen == [[value.encode() for value in given]]) is (given == ("mine",))


@pytest.mark.parametrize("then", [None, RuntimeError("boom")])
async def test_stream_that_breaks_off_ends_with_an_error_event(then: Exception | None) -> None:
    event = part(b"data: {}\n\n", True)
    _, first, last = await answered(sending(start(200, "text/event-stream; charset=utf-8"), event, then=then))
    assert first == event
    assert last["more_body"] is False
    error = json.loads(last["body"].removeprefix(b"data: "))
    check_schema("ErrorResponse", error)
    assert error["error"]["code"] == "unavailable"


async def test_stream_that_ends_well_and_body_that_breaks_off_are_left_alone() -> None:
    whole = [start(200, "text/event-stream"), part(b"data: {}\n\n", True), part(b"")]
    assert (await answered(sending(*whole)))[1:] == whole[1:]
    broken = [start(200, "application/json"), part(b'{"a"', True)]
    assert (await answered(sending(*broken)))[1:] == broken[1:]  # the server closes the connection: it is not taken for whole


@pytest.mark.parametrize("path", ["/-/healthz", "/-/routes"])
async def test_paths_of_serve_itself_are_left_alone(path: str) -> None:
    messages = [start(503), part(b"draining")]
    assert await answered(sending(*messages), path) == messages


PAGE = [(b"origin", b"https://chat.example.com")]
ALLOWED = ((b"access-control-allow-origin", b"https://chat.example.com"), (b"vary", b"Origin"))


async def test_page_that_the_gateway_allowed_may_read_the_guards_errors_until_it_is_not_allowed() -> None:
    answers = iter(
        [
            sending(start(500), part(b"no gateway")),
            sending(start(204, "text/html", *ALLOWED), part(b"")),
            sending(start(500), part(b"no gateway")),
            sending(start(200, "application/json", (b"vary", b"Origin")), part(b"{}")),
            sending(start(500), part(b"no gateway")),
        ]
    )

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        await next(answers)(scope, receive, send)

    guard = AnswerGuard(proxy)

    async def permission(headers: list[tuple[bytes, bytes]]) -> bytes | None:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        await guard({"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}, _receive, send)
        return dict(sent[0]["headers"]).get(b"access-control-allow-origin")

    found = [await permission(PAGE) for _ in range(5)]
    assert found == [None, b"https://chat.example.com", b"https://chat.example.com", None, None]


async def test_permission_of_one_page_is_no_other_ones() -> None:
    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        is_preflight = scope["method"] == "OPTIONS"
        await (sending(start(204, "text/html", *ALLOWED), part(b"")) if is_preflight else sending(start(500), part(b"")))(
            scope, receive, send
        )

    guard, sent = AnswerGuard(proxy), []

    async def send(message: Message) -> None:
        sent.append(message)

    for method, origin in (("OPTIONS", b"https://chat.example.com"), ("POST", b"https://evil.example.com")):
        await guard({"type": "http", "method": method, "path": "/", "headers": [(b"origin", origin)]}, _receive, send)
    assert b"access-control-allow-origin" not in dict(sent[-2]["headers"])
    assert sent[-2]["status"] == 500
