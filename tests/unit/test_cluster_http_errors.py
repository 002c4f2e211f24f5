"""Bad requests: each gets a 4xx with OpenAI's error body, names its field, and leaves the server as it was."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from cluster.gateway_config import GatewayConfig
from cluster.limits import RequestLimits
from cluster.protocols.openai import completion_request
from cluster.protocols.openai.chat_request import UNSUPPORTED, ChatCompletionRequest
from cluster.protocols.openai.completion_request import CompletionRequest
from replicas.text.tokenizer import Tokenizer
from router.config import RouterConfig
from tests.data_paths import SHARED_DATA
from tests.unit.in_process_cluster import MODEL, InProcessCluster, running_cluster
from tests.unit.openai_schemas import check_schema, matches_schema, schema_properties
from tests.unit.test_cluster_http_app import CHAT, TEXT, client_of

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def cluster(default_tokenizer: Tokenizer) -> AsyncIterator[InProcessCluster]:
    async with running_cluster(default_tokenizer) as running:
        yield running


@pytest.fixture
async def client(cluster: InProcessCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(cluster) as made:
        yield made
    await cluster.wait_idle()


def check_error(response: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    check_schema("ErrorResponse", body)
    assert body["error"]["param"] == param
    assert "\n" not in body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 17}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 5000}, "stop"),
        ({"stop": ["x" * 2000]}, "stop[0]"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": {"5": 10**400}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {str(index): 1 for index in range(2000)}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"priority": "high"}, "priority"),
        ({"user": 5}, "user"),
        ({"surprise": 1}, "surprise"),
    ],
)
async def test_shared_parameter_out_of_range_is_named(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    check_error(await client.post(TEXT, json={"model": MODEL, "prompt": "x", **fields}), 400, param)
    check_error(await client.post(CHAT, json={"model": MODEL, "messages": MESSAGES, **fields}), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
    ],
)
async def test_chat_parameter_wrong_or_unsupported_is_named(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    check_error(await client.post(CHAT, json={"model": MODEL, "messages": MESSAGES, **fields}), 400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "store": False, "service_tier": "auto", "modalities": ["text"]},
        {"response_format": {"type": "text"}, "verbosity": "medium", "reasoning_effort": None, "audio": None},
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"}},
        {"messages": [{"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": None}, *MESSAGES]},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}, *MESSAGES]},
        {"temperature": None, "n": None, "stop": None, "logit_bias": None, "max_tokens": None},
    ],
)
async def test_chat_parameter_that_asks_for_nothing_is_taken(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    response = await client.post(CHAT, json={"model": MODEL, "messages": MESSAGES, **fields})
    assert response.status_code == 200, response.text
    check_schema("CreateChatCompletionResponse", response.json())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, 2.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": "word " * 3000}, "prompt"),
        ({"max_tokens": 2048}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ({"messages": MESSAGES}, "messages"),
    ],
)
async def test_completion_parameter_wrong_or_unsupported_is_named(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    check_error(await client.post(TEXT, json={"model": MODEL, "prompt": "x", **fields}), 400, param)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"temperature": "0.5"}, """'temperature': must be a number, got "0.5"."""),
        ({"temperature": True}, "'temperature': must be a number, got true."),
        ({"temperature": 5}, "'temperature': must be at most 2, got 5."),
        ({"frequency_penalty": -3.5}, "'frequency_penalty': must be at least -2, got -3.5."),
        ({"repetition_penalty": 0}, "'repetition_penalty': must be greater than 0, got 0."),
        ({"seed": 1.5}, "'seed': must be an integer, got 1.5."),
        ({"seed": "x" * 500}, f"""'seed': must be an integer, got "{"x" * 79}...."""),
        ({"stream": None, "echo": "no"}, """'echo': must be true or false, got "no"."""),
        ({"n": 10**9}, "'n': this server allows at most 16 choices, got 1000000000."),
        ({"n": 10**90}, f"'n': this server allows at most 16 choices, got 1{'0' * 79}...."),
        ({"stop": 5}, "'stop': must be a string or an array of strings, got an integer."),
        ({"stop": ["x"] * 50}, "'stop': this server allows at most 16 strings, got 50."),
        ({"stop_token_ids": {}}, "'stop_token_ids': must be an array, got an object."),
        ({"logit_bias": {"5": 1e3}}, "'logit_bias': must have values from -100 to 100, got 1000.0 for token 5."),
        ({"stream_options": 5, "stream": True}, "'stream_options': must be an object, got 5."),
        ({"user": "u" * 600}, "'user': must have at most 512 characters, got 600."),
        ({"metadata": {str(key): "v" for key in range(20)}}, "'metadata': must have at most 16 entries, got 20."),
        ({"metadata": {"k" * 600: "v"}}, f"'metadata.{'k' * 191}': must have at most 512 characters, got 600."),
        ({"min_tokens": 9, "max_tokens": 8}, "'min_tokens': must be at most max_tokens (8), got 9."),
        ({"prompt": [1, "a"]}, """'prompt': must hold token ids (integers from 0), got "a"."""),
    ],
)
async def test_message_says_what_is_wrong_in_the_words_of_json(client: httpx.AsyncClient, fields: dict[str, Any], problem: str) -> None:
    response = await client.post(TEXT, json={"model": MODEL, "prompt": "x", **fields})
    assert response.json()["error"]["message"] == f"Invalid value for {problem}"


async def test_every_message_of_a_chat_field_is_free_of_pythons_words(client: httpx.AsyncClient) -> None:
    wrong: list[Any] = [None, True, -1, 1.5, 10**30, "x", "", [], [None], {}, {"a": None}]
    for name in sorted({*ChatCompletionRequest.model_fields, *UNSUPPORTED}):
        for value in wrong:
            response = await client.post(CHAT, json={"model": MODEL, "messages": MESSAGES, "max_tokens": 2, name: value})
            if response.status_code == 200:
                continue
            message = response.json()["error"]["message"]
            assert message.count(" got ") <= 1, message
            assert not re.search(
                r"\b(input|dictionary|instance|NoneType|validation|None|True|False|ChatMessage|str|dict|list)\b", message
            ), message


async def test_missing_model_and_messages_are_named(client: httpx.AsyncClient) -> None:
    check_error(await client.post(CHAT, json={"messages": MESSAGES}), 400, "model")
    check_error(await client.post(CHAT, json={"model": MODEL}), 400, "messages")
    check_error(await client.post(TEXT, json={"model": MODEL}), 400, "prompt")


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


async def test_overflowing_float_is_refused_by_name(client: httpx.AsyncClient) -> None:
    body = b'{"model": "echo", "prompt": "x", "temperature": 1e999}'
    check_error(await client.post(TEXT, content=body), 400, "temperature")
    body = b'{"model": "echo", "prompt": "x", "logit_bias": {"1": 1e999}}'
    check_error(await client.post(TEXT, content=body), 400, "logit_bias")


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
        await asyncio.sleep(0.2)
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
        assert check_error(failed, 500, None)["code"] == "generation_failed"
        assert fine.json()["choices"][0]["text"] == "all is well"
        streamed = await client.post(TEXT, json={"model": MODEL, "prompt": [*default_tokenizer.encode("so far "), bad], "stream": True})
        assert streamed.status_code == 200
        last = json.loads(streamed.text.strip().split("\n\n")[-1].removeprefix("data: "))
        check_schema("ErrorResponse", last)
        await cluster.wait_idle()


def published_examples() -> list[dict[str, Any]]:
    lines = (SHARED_DATA / "api" / "openai_examples.jsonl").read_text().splitlines()
    return [example for line in lines if (example := json.loads(line))["request"] is not None and example["method"] == "post"]


@pytest.mark.parametrize(
    "example", [e for e in published_examples() if e["path"] in ("/chat/completions", "/completions")], ids=lambda e: e["title"] or "plain"
)
async def test_published_example_is_answered_or_refused_by_name(client: httpx.AsyncClient, example: dict[str, Any]) -> None:
    body = {**example["request"], "model": MODEL}
    response = await client.post(f"/v1{example['path']}", json=body)
    if response.status_code == 200 and body.get("stream"):
        assert response.text.endswith("data: [DONE]\n\n")
    elif response.status_code == 200:
        name = "CreateChatCompletionResponse" if "chat" in example["path"] else "CreateCompletionResponse"
        assert matches_schema(name, response.json())
    else:
        error = check_error(response, 400, response.json()["error"]["param"])
        assert error["param"] is not None


@pytest.mark.parametrize(
    ("schema", "model", "unsupported"),
    [
        ("CreateChatCompletionRequest", ChatCompletionRequest, UNSUPPORTED),
        ("CreateCompletionRequest", CompletionRequest, completion_request.UNSUPPORTED),
    ],
)
def test_every_parameter_of_the_description_is_honoured_or_refused_by_name(schema: str, model: Any, unsupported: dict[str, Any]) -> None:
    described = schema_properties(schema)
    assert len(described) > 15
    assert described <= model.model_fields.keys() | unsupported.keys()
    assert not model.model_fields.keys() & unsupported.keys()
