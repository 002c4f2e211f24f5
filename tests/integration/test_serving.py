"""The deployed application over HTTP: answers, cancellation, and what clients see when something dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import ray
from openai import AsyncOpenAI

from tests.integration.conftest import CALLER_LEASE_S, MODEL
from tests.integration.deployed import Deployed, is_idle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LONG = {"max_tokens": 1500, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture
async def client(deployed: Deployed) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{deployed.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        await deployed.wait_until(lambda model: len(model["replicas"]) == 2, timeout_s=60)
        yield made


def kill_actor(name_contains: str) -> None:
    """The process of one Serve actor, at once and without a word."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if name_contains in actor["name"]:
            ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]), no_restart=True)
            return
    raise AssertionError(f"no actor named like {name_contains}")


async def complete(client: AsyncOpenAI, prompt: str, **options: Any) -> Any:
    return await client.completions.create(model=MODEL, prompt=prompt, **options)


async def streamed_text(client: AsyncOpenAI, prompt: str, started: asyncio.Event | None = None, **options: Any) -> str:
    text = ""
    async for chunk in await client.completions.create(model=MODEL, prompt=prompt, stream=True, **options):
        text += chunk.choices[0].text
        if started is not None:
            started.set()
    return text


async def test_chat_streamed_equals_whole(client: AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me about rivers."}]
    whole = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=40, temperature=0)
    stream = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=40, temperature=0, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content
    assert whole.usage.completion_tokens >= 1


async def test_seeded_choices_are_the_same_under_load(client: AsyncOpenAI) -> None:
    options = {"max_tokens": 30, "seed": 11, "n": 3}
    messages = [{"role": "user", "content": "Once upon a time"}]

    async def ask() -> list[str]:
        """A completion of three choices, a streamed one and a chat, each with its seed."""
        whole, streamed, chat = await asyncio.gather(
            complete(client, "Once upon a time", **options),
            streamed_text(client, "Twice upon a time", max_tokens=30, seed=-5, temperature=1.3, top_p=0.9),
            client.chat.completions.create(model=MODEL, messages=messages, max_tokens=30, seed=7, frequency_penalty=0.5),
        )
        return [*(choice.text for choice in whole.choices), streamed, chat.choices[0].message.content]

    alone = await ask()
    *crowd, among = await asyncio.gather(*(complete(client, f"Story {index}", max_tokens=60, n=2) for index in range(16)), ask())
    assert among == alone
    assert len(set(alone)) == 5
    assert len({choice.text for answer in crowd for choice in answer.choices}) > 16


async def test_errors_have_the_clients_own_classes(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model=MODEL, prompt="x", max_tokens=10_000)
    assert bad.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_frees_every_block(client: AsyncOpenAI, deployed: Deployed, stream: bool) -> None:
    body = {"model": MODEL, "prompt": "endless", "max_tokens": 3000, "ignore_eos": True, "stream": stream}
    async with httpx.AsyncClient(timeout=60) as http:
        task = asyncio.create_task(http.post(f"{deployed.url}/v1/completions", json=body))
        await deployed.wait_until(lambda model: any(replica["num_running"] for replica in model["replicas"].values()))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await deployed.wait_until(is_idle, timeout_s=3)


async def test_stop_string_ends_the_request_on_the_replica(client: AsyncOpenAI, deployed: Deployed) -> None:
    whole = await complete(client, "The", max_tokens=60, temperature=0)
    text = whole.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = await complete(client, "The", temperature=0, stop=[stop], max_tokens=3000)
    assert cut.choices[0].text == text[: text.index(stop)]
    await deployed.wait_until(is_idle, timeout_s=3)


async def test_replica_killed_in_mid_stream_is_only_a_pause(client: AsyncOpenAI, deployed: Deployed) -> None:
    expected = (await complete(client, "A long tale", **LONG)).choices[0].text
    started = asyncio.Event()
    streams = [asyncio.create_task(streamed_text(client, "A long tale", started, **LONG)) for _ in range(4)]
    await started.wait()
    await deployed.wait_until(lambda model: any(replica["num_running"] for replica in model["replicas"].values()))
    view = await deployed.view()
    busy = next(replica_id for replica_id, replica in view["replicas"].items() if replica["num_running"])
    kill_actor(f"#{busy}")
    assert await asyncio.gather(*streams) == [expected] * 4
    await deployed.wait_until(lambda model: busy not in model["replicas"] and len(model["replicas"]) == 2, timeout_s=60)


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


async def test_answers_under_a_schema_validate_whole_and_streamed(client: AsyncOpenAI) -> None:
    properties = {
        "colour": {"enum": ["ultramarine", "vermilion"]},
        "number_of_pieces": {"type": "integer", "minimum": 10, "maximum": 99},
        "note": {"type": "string", "maxLength": 12},
    }
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    options: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "response_format": schema_format(schema)}
    for seed in range(3):
        whole = await client.chat.completions.create(model=MODEL, seed=seed, **options)
        assert whole.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(whole.choices[0].message.content), schema)
        stream = await client.chat.completions.create(model=MODEL, seed=seed, stream=True, **options)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == whole.choices[0].message.content
    word = await complete(client, "x", max_tokens=20, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert word.choices[0].text in ("yes", "no")


async def test_schema_that_cannot_be_enforced_is_refused_by_name_or_reduced(client: AsyncOpenAI) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3, "uniqueItems": True}
    outputs = {"json": schema}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        await complete(client, "x", extra_body={"structured_outputs": outputs})
    assert (refused.value.param, refused.value.code) == ("structured_outputs.json", "invalid_grammar")
    answer = await client.completions.with_raw_response.create(
        model=MODEL, prompt="x", max_tokens=20, extra_body={"structured_outputs": {**outputs, "unsupported": "warn"}}
    )
    assert "uniqueItems" in answer.headers["x-unsupported-keywords"]
    jsonschema.validate(json.loads(answer.parse().choices[0].text), {**schema, "uniqueItems": False})


async def test_replica_killed_in_mid_json_continues_to_the_same_valid_document(client: AsyncOpenAI, deployed: Deployed) -> None:
    item = {"type": "object", "properties": {"measured_value": {"type": "integer", "minimum": 0, "maximum": 9_999_999}}}
    item |= {"required": ["measured_value"], "additionalProperties": False}
    schema = {"type": "array", "items": item, "minItems": 200, "maxItems": 200}
    options = {"max_tokens": 3500, "seed": 4, "extra_body": {"response_format": schema_format(schema)}}
    expected = (await complete(client, "A long list", **options)).choices[0].text
    jsonschema.validate(json.loads(expected), schema)
    started = asyncio.Event()
    stream = asyncio.create_task(streamed_text(client, "A long list", started, **options))
    await started.wait()
    await deployed.wait_until(lambda model: any(replica["num_running"] for replica in model["replicas"].values()))
    busy = next(replica_id for replica_id, replica in (await deployed.view())["replicas"].items() if replica["num_running"])
    kill_actor(f"#{busy}")
    assert await stream == expected
    await deployed.wait_until(lambda model: busy not in model["replicas"] and len(model["replicas"]) == 2, timeout_s=60)


async def test_replica_that_hangs_is_only_a_pause_and_holds_nothing_when_it_goes_on(client: AsyncOpenAI, deployed: Deployed) -> None:
    expected = (await complete(client, "A long tale", **LONG)).choices[0].text
    started = asyncio.Event()
    streams = [asyncio.create_task(streamed_text(client, "A long tale", started, **LONG)) for _ in range(4)]
    await started.wait()
    await deployed.wait_until(lambda model: any(replica["num_running"] for replica in model["replicas"].values()))
    busy = next(replica_id for replica_id, replica in (await deployed.view())["replicas"].items() if replica["num_running"])
    pid = deployed.pid_of(f"replica-{MODEL}", busy)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert await asyncio.gather(*streams) == [expected] * 4
        assert (await deployed.view())["replicas"][busy]["is_fenced"]
    finally:
        os.kill(pid, signal.SIGCONT)
    await deployed.wait_until(lambda model: is_idle(model) and len(model["replicas"]) == 2, timeout_s=60)


async def test_gateway_killed_has_its_requests_cancelled(client: AsyncOpenAI, deployed: Deployed) -> None:
    started = [asyncio.Event() for _ in range(8)]
    streams = [asyncio.create_task(streamed_text(client, f"Tale {i}", started[i], **LONG)) for i in range(8)]
    await asyncio.gather(*(event.wait() for event in started))
    os.kill(deployed.pid_of("gateway"), signal.SIGKILL)
    results = await asyncio.gather(*streams, return_exceptions=True)
    assert 0 < sum(isinstance(result, Exception) for result in results) < 8  # those of the other gateway went on
    await deployed.wait_until(is_idle, timeout_s=CALLER_LEASE_S + 4)


async def test_explanation_of_an_answer_names_its_replica_and_every_cost(client: AsyncOpenAI, deployed: Deployed) -> None:
    answer = await complete(client, "explain this", max_tokens=2)
    async with httpx.AsyncClient() as http:
        body = (await http.get(f"{deployed.url}/debug/router/explain/{answer.id}", timeout=10)).json()
        assert (await http.get(f"{deployed.url}/debug/router/explain/nobody", timeout=10)).status_code == 404
    (decision,) = body["answers"]
    assert decision["request_id"] == f"{answer.id}-0"
    assert decision["replica"] in {candidate["replica"] for candidate in decision["candidates"]}
    assert len(decision["candidates"]) == 2


async def test_idle_replica_killed_is_noticed_and_replaced(client: AsyncOpenAI, deployed: Deployed) -> None:
    dead = next(iter((await deployed.view())["replicas"]))
    kill_actor(f"#{dead}")
    await deployed.wait_until(lambda model: dead not in model["replicas"], timeout_s=10)
    await deployed.wait_until(lambda model: len(model["replicas"]) == 2, timeout_s=60)


async def test_router_killed_leaves_streams_alone_and_comes_back(client: AsyncOpenAI, deployed: Deployed) -> None:
    expected = (await complete(client, "A long tale", **LONG)).choices[0].text
    started = asyncio.Event()
    stream = asyncio.create_task(streamed_text(client, "A long tale", started, **LONG))
    await started.wait()
    kill_actor("#router#")
    answer = await complete(client, "after the router died", max_tokens=4)
    assert answer.usage.completion_tokens >= 1
    assert await stream == expected
    await deployed.wait_until(lambda model: len(model["replicas"]) == 2, timeout_s=30)


async def test_header_bytes_that_are_not_utf8_get_an_error_body(deployed: Deployed) -> None:
    body = b'{"model": "%s", "prompt": "x", "max_tokens": 2}' % MODEL.encode()
    for header in (b"X-Other: \xff\xfe", b"X-Tenant: caf\xe9", b"Authorization: Bearer \x80"):
        reader, writer = await asyncio.open_connection("127.0.0.1", deployed.port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(head + header + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        status, _, text = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n")
        writer.close()
        assert status.split()[1] == b"400", (header, status, text)
        assert json.loads(text.split(b"\r\n\r\n")[1])["error"]["code"] == "invalid_header"
