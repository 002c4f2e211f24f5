"""Every shared prompt through the HTTP surface: a stream says exactly what the whole answer says."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from replicas.text.tokenizer import Tokenizer
from tests.data_paths import SHARED_DATA
from tests.unit.in_process_cluster import CHAT, MODEL, TEXT, events_of

PROMPTS = SHARED_DATA / "prompts"
REPLACEMENT = "\ufffd"
BATCH = 16


def naughty_strings() -> list[str]:
    strings: list[str] = json.loads((PROMPTS / "blns.json").read_text())
    return [text for text in strings if text]


def xquad_texts(languages: tuple[str, ...]) -> list[str]:
    rows = [json.loads(line) for line in (PROMPTS / "xquad_shared_prefix.jsonl").read_text().splitlines()]
    return [text for row in rows if row["lang"] in languages for text in _strings(row)]


def _strings(row: dict[str, Any]) -> list[str]:
    return [value for key, value in row.items() if isinstance(value, str) and len(value) > 20 and key not in ("id", "lang")]


def mt_bench_conversations() -> list[list[dict[str, str]]]:
    """First question, an answer, second question: what a second turn looks like to the server."""
    rows = [json.loads(line) for line in (PROMPTS / "mt_bench_question.jsonl").read_text().splitlines()]
    return [
        [
            {"role": "user", "content": row["turns"][0]},
            {"role": "assistant", "content": "Here is my answer: ça va — 好的。"},
            {"role": "user", "content": row["turns"][1]},
        ]
        for row in rows
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
async def test_naughty_strings_stream_as_they_are(client: httpx.AsyncClient, default_tokenizer: Tokenizer) -> None:
    prompts = naughty_strings()
    assert len(prompts) > 400
    await check_prompts(client, prompts, default_tokenizer)


@pytest.mark.slow
async def test_chinese_and_russian_texts_stream_as_they_are(client: httpx.AsyncClient, default_tokenizer: Tokenizer) -> None:
    texts = sorted(set(xquad_texts(("zh", "ru"))))
    short = [text for text in texts if len(default_tokenizer.encode(text)) < 900]
    assert len(short) > 20
    await check_prompts(client, short[:100], default_tokenizer)


@pytest.mark.slow
async def test_second_turns_stream_as_they_are(client: httpx.AsyncClient, default_tokenizer: Tokenizer) -> None:
    for messages in mt_bench_conversations():
        num_prompt = len(default_tokenizer.chat_prompt_ids(messages))
        body = {"model": MODEL, "messages": messages, "max_tokens": min(num_prompt, 900), "ignore_eos": True}
        whole, streamed = await asyncio.gather(client.post(CHAT, json=body), client.post(CHAT, json={**body, "stream": True}))
        expected = whole.json()["choices"][0]["message"]["content"]
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in events_of(streamed.text)) == expected
        assert REPLACEMENT not in expected
