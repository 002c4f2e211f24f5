"""Clients send back what they got: each answer is a turn of the next request, whole or gathered from a stream."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from replicas.text.tokenizer import Tokenizer
from tests.unit.http_server import serving
from tests.unit.in_process_cluster import CHAT, MODEL, InProcessCluster, events_of

ASK = {"role": "user", "content": "one two"}


async def test_message_of_an_answer_is_taken_back(client: httpx.AsyncClient) -> None:
    first = (await client.post(CHAT, json={"model": MODEL, "messages": [ASK], "max_tokens": 3})).json()
    message = first["choices"][0]["message"]
    answer = await client.post(CHAT, json={"model": MODEL, "messages": [ASK, message, ASK], "max_tokens": 3})
    assert answer.status_code == 200, answer.text


async def test_deltas_of_a_stream_are_taken_back(client: httpx.AsyncClient) -> None:
    answer = await client.post(CHAT, json={"model": MODEL, "messages": [ASK], "max_tokens": 3, "stream": True})
    message: dict[str, Any] = {}
    for event in events_of(answer.text):
        for name, value in event["choices"][0]["delta"].items():
            message[name] = message[name] + value if isinstance(message.get(name), str) and name == "content" else value
    again = await client.post(CHAT, json={"model": MODEL, "messages": [ASK, message, ASK], "max_tokens": 3})
    assert again.status_code == 200, again.text


async def test_message_as_the_openai_client_dumps_it_is_taken_back(cluster: InProcessCluster) -> None:
    async with serving(cluster.app) as port, AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as openai:
        first = await openai.chat.completions.create(model=MODEL, messages=[ASK], max_tokens=3)  # type: ignore[list-item]
        dumped = first.choices[0].message.model_dump()
        again = await openai.chat.completions.create(model=MODEL, messages=[ASK, dumped, ASK], max_tokens=3)  # type: ignore[list-item]
        assert again.choices[0].message.role == "assistant"


@pytest.mark.parametrize(
    ("turn", "content"),
    [
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"refusal": "I cannot."}, "I cannot."),
        ({"content": "", "refusal": "I cannot."}, "I cannot."),
        ({"content": "Sorry.", "refusal": "I cannot."}, "Sorry.\nI cannot."),
        ({"content": "Sorry.", "refusal": None}, "Sorry."),
        ({"content": "Sorry.", "refusal": ""}, "Sorry."),
        ({"content": [{"type": "refusal", "refusal": "I cannot."}]}, "I cannot."),
        ({"content": [{"type": "text", "text": "Sorry."}, {"type": "refusal", "refusal": "I cannot."}]}, "Sorry.\nI cannot."),
        ({"content": None, "tool_calls": []}, ""),
        ({"content": None, "tool_calls": None, "function_call": None, "audio": None, "annotations": None}, ""),
        ({"content": "x", "tool_calls": [], "annotations": [], "parsed": None}, "x"),
    ],
)
async def test_turn_of_an_assistant_is_the_text_that_it_holds(
    client: httpx.AsyncClient, default_tokenizer: Tokenizer, turn: dict[str, Any], content: str
) -> None:
    body = {"model": MODEL, "messages": [ASK, {"role": "assistant", **turn}, ASK]}
    answer = await client.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["tokens"] == default_tokenizer.chat_prompt_ids([ASK, {"role": "assistant", "content": content}, ASK])
