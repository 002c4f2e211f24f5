"""Requests that fail: each gets its status with OpenAI's error body, and leaves the server as it was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from cluster.settings.gateway_config import GatewayConfig
from cluster.settings.limits import RequestLimits
from replicas.text.tokenizer import Tokenizer
from router.config import RouterConfig
from tests.unit.in_process_cluster import CHAT, MODEL, TEXT, client_of, running_cluster
from tests.unit.openai_schemas import check_error, check_schema

MESSAGES = [{"role": "user", "content": "hi"}]


async def test_unknown_model_is_404_and_lists_what_is_served(client: httpx.AsyncClient) -> None:
    error = check_error(await client.post(CHAT, json={"model": "gpt-9", "messages": MESSAGES}), 404, "model")
    assert error["code"] == "model_not_found"
    assert MODEL in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model": "echo", "prompt": "x"',
        b"[1, 2]",
        b'"text"',
        b"null",
        b'{"model": "echo", "prompt": NaN}',
        b'{"model": "echo", "prompt": "x", "temperature": Infinity}',
        b'{"model": "echo", "prompt": "\xff\xfe"}',
        b'{"model": "echo", "prompt": "\\ud800"}',
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b"[" * 100_000,
        b'{"n": ' + b"9" * 10_000 + b"}",
        b"\x00\x01\x02",
    ],
)
async def test_malformed_json_is_a_400(client: httpx.AsyncClient, body: bytes) -> None:
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        check_error(await client.post(path, content=body), 400, None)


async def test_prompt_far_over_the_context_is_refused_before_it_is_all_tokenized(
    client: httpx.AsyncClient, default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_chars = 0
    encode = default_tokenizer.encode

    def counting(text: str, *args: Any, **kwargs: Any) -> list[int]:
        nonlocal num_chars
        num_chars += len(text) if not args and not kwargs.get("limit") else 0
        return encode(text, *args, **kwargs)

    monkeypatch.setattr(default_tokenizer, "encode", counting)
    text = "word " * 600_000
    for path, body in ((TEXT, {"prompt": text}), (CHAT, {"messages": [{"role": "user", "content": text}]})):
        error = check_error(await client.post(path, json={"model": MODEL, **body}), 400, next(iter(body)))
        assert error["code"] == "context_length_exceeded"
    assert num_chars <= 2 * 32_768


async def test_null_bytes_in_text_are_text(client: httpx.AsyncClient) -> None:
    response = await client.post(TEXT, json={"model": MODEL, "prompt": "a\x00b", "max_tokens": 20})
    assert response.json()["choices"][0]["text"] == "a\x00b"


async def test_body_over_the_limit_is_413_told_or_not(client: httpx.AsyncClient) -> None:
    huge = b'{"model": "echo", "prompt": "' + b"x" * 10_000_000 + b'"}'
    check_error(await client.post(TEXT, content=huge), 413, None)

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(huge), 1 << 20):
            yield huge[start : start + (1 << 20)]

    check_error(await client.post(TEXT, content=chunks()), 413, None)


async def test_unknown_route_and_method_have_the_same_body(client: httpx.AsyncClient) -> None:
    unknown = check_error(await client.get("/v1/nothing"), 404, None)
    assert (unknown["code"], unknown["message"]) == ("unknown_url", "Invalid URL (GET /v1/nothing).")
    assert check_error(await client.get(CHAT), 405, None)["code"] == "method_not_allowed"
    assert check_error(await client.delete("/v1/models"), 405, None)["code"] == "method_not_allowed"


async def test_limits_come_from_the_configuration(default_tokenizer: Tokenizer) -> None:
    limits = RequestLimits(max_body_bytes=200, max_n=2, max_stop_strings=1, max_messages=1)
    async with running_cluster(default_tokenizer, config=GatewayConfig(limits=limits)) as cluster, client_of(cluster) as client:
        check_error(await client.post(TEXT, json={"model": MODEL, "prompt": "x" * 200}), 413, None)
        check_error(await client.post(TEXT, json={"model": MODEL, "prompt": "x", "n": 3}), 400, "n")
        check_error(await client.post(TEXT, json={"model": MODEL, "prompt": "x", "stop": ["a", "b"]}), 400, "stop")
        check_error(await client.post(CHAT, json={"model": MODEL, "messages": MESSAGES * 2}), 400, "messages")


TEMPLATE = (
    "{% if tone is defined %}{{ 'Be ' + tone }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate, please') }}{% endif %}"
    "{{ message.content }}{% endfor %}"
)


async def test_template_error_is_a_400_with_the_templates_words(
    client: httpx.AsyncClient, default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_tokenizer._hf, "chat_template", TEMPLATE)
    error = check_error(await client.post(CHAT, json={"model": MODEL, "messages": MESSAGES * 2}), 400, "messages")
    assert error["message"] == "the chat template refuses these messages: Roles must alternate, please"


@pytest.mark.parametrize("value", [5, {"a": 1}, None])
async def test_template_argument_that_breaks_the_template_is_named_without_internals(
    client: httpx.AsyncClient, default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    monkeypatch.setattr(default_tokenizer._hf, "chat_template", TEMPLATE)
    body = {"model": MODEL, "messages": MESSAGES, "chat_template_kwargs": {"tone": value}}
    error = check_error(await client.post(CHAT, json=body), 400, "chat_template_kwargs")
    assert error["message"] == "the chat template cannot work with these chat_template_kwargs (tone)"


async def test_full_queue_is_429_with_retry_after(default_tokenizer: Tokenizer) -> None:
    async with (
        running_cluster(default_tokenizer, router_config=RouterConfig(max_queue_requests=2)) as cluster,
        client_of(cluster) as client,
    ):
        engine = cluster.replicas[0].engine
        engine.gate.clear()
        body = {"model": MODEL, "prompt": "one two three", "max_tokens": 10}
        calls = [asyncio.create_task(client.post(TEXT, json=body)) for _ in range(60)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        engine.gate.set()
        responses = await asyncio.gather(*calls)
        statuses = [response.status_code for response in responses]
        assert set(statuses) == {200, 429}
        refused = next(response for response in responses if response.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert check_error(refused, 429, None)["code"] == "rate_limit_exceeded"
        await cluster.wait_idle()


async def test_engine_failure_of_one_request_is_a_500_for_it_alone(default_tokenizer: Tokenizer) -> None:
    from tests.unit.fake_engine import EchoEngine

    bad = default_tokenizer.encode(" poison")[0]

    def make() -> EchoEngine:
        return EchoEngine(eos_token_id=min(default_tokenizer.eos_token_ids), vocab_size=default_tokenizer.vocab_size, failing_token_id=bad)

    async with running_cluster(default_tokenizer, make_engine=make) as cluster, client_of(cluster) as client:
        failed, fine = await asyncio.gather(
            client.post(TEXT, json={"model": MODEL, "prompt": [bad], "max_tokens": 5}),
            client.post(TEXT, json={"model": MODEL, "prompt": "all is well", "max_tokens": 9}),
        )
        error = check_error(failed, 500, None)
        assert error["code"] == "generation_failed"
        assert error["message"] == "the engine failed while it ran this request; the server's log has the reason"
        assert fine.json()["choices"][0]["text"] == "all is well"
        streamed = await client.post(TEXT, json={"model": MODEL, "prompt": [*default_tokenizer.encode("so far "), bad], "stream": True})
        assert streamed.status_code == 200
        last = json.loads(streamed.text.strip().split("\n\n")[-1].removeprefix("data: "))
        check_schema("ErrorResponse", last)
        await cluster.wait_idle()
