"""Every test prompt through the HTTP surface: a stream says exactly what the whole answer says."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from replicas.text.tokenizer import Tokenizer
from tests.prompts import conversations, reading_tasks, tricky_strings
from tests.unit.in_process_cluster import CHAT, MODEL, TEXT, events_of

REPLACEMENT = "\ufffd"
BATCH = 16


def second_turns() -> list[list[dict[str, str]]]:
    """First question, an answer, second question: what a second turn looks like to the server."""
    return [
        [
            {"role": "user", "content": first},
            {"role": "assistant", "content": "Here is my answer: ça va — 好的。"},
            {"role": "user", "content": second},
        ]
        for first, second in conversations()
    ]


async def both_texts(client: httpx.AsyncClient, prompt: str) -> tuple[str, str]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1000, "skip_special_tokens": False}
    whole, streamed = await asyncio.gather(client.post(TEXT, json=body), client.post(TEXT, json={**body, "stream": True}))
    assert whole.status_code == 200, whole.text
    return whole.json()["choices"][0]["text"], "".join(chunk["choices"][0]["text"] for chunk in events_of(streamed.text))


async def check_prompts(client: httpx.AsyncClient, prompts: list[str], tokenizer: Tokenizer) -> None:
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        for prompt, (whole, streamed) in zip(batch, await asyncio.gather(*(both_texts(client, p) for p in batch)), strict=True):
            assert streamed == whole
            assert whole == tokenizer.decode(tokenizer.encode(prompt), skip_special_tokens=False)
            assert streamed.count(REPLACEMENT) == prompt.count(REPLACEMENT)


@pytest.mark.slow
async def test_tricky_strings_stream_as_they_are(client: httpx.AsyncClient, default_tokenizer: Tokenizer) -> None:
    # one that holds the model's own end ends its answer there
    ends = default_tokenizer.eos_token_ids
    prompts = [text for text in tricky_strings() if text and ends.isdisjoint(default_tokenizer.encode(text))]
    assert len(prompts) > 200
    await check_prompts(client, prompts, default_tokenizer)


@pytest.mark.slow
async def test_texts_of_other_scripts_stream_as_they_are(client: httpx.AsyncClient, default_tokenizer: Tokenizer) -> None:
    texts = [f"{context}\n{question}" for context, questions in reading_tasks() for question in questions]
    short = [text for text in texts if len(default_tokenizer.encode(text)) < 900]
    assert len(short) > 90
    await check_prompts(client, short, default_tokenizer)


@pytest.mark.slow
async def test_second_turns_stream_as_they_are(client: httpx.AsyncClient, default_tokenizer: Tokenizer) -> None:
    for messages in second_turns():
        num_prompt = len(default_tokenizer.chat_prompt_ids(messages))
        body = {"model": MODEL, "messages": messages, "max_tokens": min(num_prompt, 900), "ignore_eos": True}
        whole, streamed = await asyncio.gather(client.post(CHAT, json=body), client.post(CHAT, json={**body, "stream": True}))
        expected = whole.json()["choices"][0]["message"]["content"]
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in events_of(streamed.text)) == expected
        assert REPLACEMENT not in expected
