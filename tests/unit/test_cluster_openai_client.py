"""The published `openai` client against the gateway over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI

from replicas.text.tokenizer import Tokenizer
from router.config import RouterConfig
from tests.unit.http_server import serving
from tests.unit.in_process_cluster import MODEL, InProcessCluster, running_cluster


@pytest.fixture
async def cluster(default_tokenizer: Tokenizer) -> AsyncIterator[InProcessCluster]:
    async with running_cluster(default_tokenizer, router_config=RouterConfig(max_queue_requests=4, no_replica_timeout_s=0.3)) as running:
        yield running


@pytest.fixture
async def client(cluster: InProcessCluster) -> AsyncIterator[AsyncOpenAI]:
    async with serving(cluster.app) as port, AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_client_reads_a_whole_chat_and_a_streamed_one(client: AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "hello there"}]
    extra = {"ignore_eos": True}
    whole = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=40, extra_body=extra)
    stream = await client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=40, stream=True, stream_options={"include_usage": True}, extra_body=extra
    )
    text, usage = "", None
    async for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert "hello there" in text
    assert usage == whole.usage.model_copy(update={"prompt_tokens_details": usage.prompt_tokens_details})
    assert usage.completion_tokens == 40


async def test_client_reads_a_completion_with_choices_logprobs_and_stop(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="a b c END d", n=3, logprobs=2, stop="END", max_tokens=50, seed=7)
    assert [choice.text for choice in answer.choices] == ["a b c "] * 3
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    assert answer.choices[0].logprobs.token_logprobs[0] == -0.5
    stream = await client.completions.create(model=MODEL, prompt="a b c", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "a b c"


async def test_client_lists_and_retrieves_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_client_raises_its_own_class_for_each_error(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="nobody", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model=MODEL, prompt="x", temperature=5)
    assert bad.value.param == "temperature"


async def test_client_gets_rate_limit_error_when_the_queue_is_full(client: AsyncOpenAI, cluster: InProcessCluster) -> None:
    cluster.replicas[0].engine.gate.clear()
    calls = [asyncio.create_task(client.completions.create(model=MODEL, prompt="one two", max_tokens=5)) for _ in range(40)]
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    cluster.replicas[0].engine.gate.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(result) for result in results if isinstance(result, Exception)} == {openai.RateLimitError}
    assert any(not isinstance(result, Exception) for result in results)


async def test_client_raises_when_an_error_event_ends_the_stream(client: AsyncOpenAI, cluster: InProcessCluster) -> None:
    engine = cluster.replicas[0].engine
    engine.close_gate_after = 20
    extra = {"ignore_eos": True}
    stream = await client.completions.create(model=MODEL, prompt="a b c d", max_tokens=1900, stream=True, extra_body=extra)
    assert (await anext(stream)).choices[0].text
    engine.tokens_left = 0
    engine.gate.set()

    async def read_to_the_end() -> None:
        async for _ in stream:
            pass

    with pytest.raises(openai.APIError) as ended:
        await read_to_the_end()
    assert ended.value.code == "unavailable"
