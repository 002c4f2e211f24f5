"""Log-probabilities of the prompt over HTTP: `echo` with `logprobs`, and the extension `prompt_logprobs`.

The echo engine gives token i of a prompt the log-probability -i, and each of its answer's tokens -0.5.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from replicas.text.tokenizer import Tokenizer
from tests.small_tokenizers import small_tokenizer
from tests.unit.fake_engine import LOGPROB, EchoEngine
from tests.unit.in_process_cluster import CHAT, MODEL, TEXT, client_of, events_of, running_cluster
from tests.unit.openai_schemas import check_completion, check_error, check_schema

PROMPT = "Grüße, 世界 🙂!"


def check_echo(choice: dict[str, Any], prompt: str, tokenizer: Tokenizer, num_answer: int) -> None:
    ids = tokenizer.encode(prompt)
    found = choice["logprobs"]
    lists = (found["tokens"], found["token_logprobs"], found["top_logprobs"], found["text_offset"])
    assert {len(each) for each in lists} == {len(ids) + num_answer}
    assert found["tokens"][: len(ids)] == [tokenizer.token_text(token_id) for token_id in ids]
    assert found["token_logprobs"] == [None, *(-float(position) for position in range(1, len(ids))), *[LOGPROB] * num_answer]
    assert found["top_logprobs"][0] is None
    for token, logprob, top in zip(*lists[:3], strict=True):
        if top is not None:
            assert top[token] == logprob
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if "\ufffd" not in token:
            assert choice["text"][offset : offset + len(token)] == token
    assert found["text_offset"] == sorted(found["text_offset"])


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("num_choices", [1, 3])
async def test_echo_with_logprobs_scores_the_prompt_whole_and_streamed(
    client: httpx.AsyncClient, default_tokenizer: Tokenizer, max_tokens: int, num_choices: int
) -> None:
    prompts = [PROMPT, "one"]
    body = {"model": MODEL, "prompt": prompts, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "n": num_choices}
    whole = (await client.post(TEXT, json={**body, "ignore_eos": True})).json()
    check_completion(whole)
    assert whole["usage"]["completion_tokens"] == len(prompts) * num_choices * max_tokens
    assert len(whole["choices"]) == len(prompts) * num_choices
    for choice in whole["choices"]:
        prompt = prompts[choice["index"] // num_choices]
        assert choice["text"].startswith(prompt)
        assert choice["finish_reason"] == "length"
        check_echo(choice, prompt, default_tokenizer, max_tokens)

    stream = await client.post(TEXT, json={**body, "ignore_eos": True, "stream": True})
    merged: dict[int, dict[str, Any]] = {}
    for chunk in events_of(stream.text):
        (part,) = chunk["choices"]
        choice = merged.setdefault(part["index"], {"index": part["index"], "text": "", "logprobs": {}})
        choice["text"] += part["text"]
        choice["finish_reason"], choice["stop_reason"] = part["finish_reason"], part.get("stop_reason")
        for name, values in part["logprobs"].items():
            choice["logprobs"].setdefault(name, []).extend(values)
    assert [merged[index] for index in sorted(merged)] == whole["choices"]


async def test_echo_of_token_ids_with_logprobs_names_special_tokens(client: httpx.AsyncClient, default_tokenizer: Tokenizer) -> None:
    special = min(default_tokenizer.special_token_ids)
    ids = [special, *default_tokenizer.encode("to be")]
    body = {"model": MODEL, "prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0}
    (choice,) = (await client.post(TEXT, json=body)).json()["choices"]
    assert choice["text"] == default_tokenizer.decode(ids, skip_special_tokens=False)
    for token, offset in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token


async def test_scored_prompt_takes_nothing_from_the_cache_and_leaves_it_filled(client: httpx.AsyncClient) -> None:
    prompt = [*range(100, 164)]
    plain = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    scored = {**plain, "echo": True, "logprobs": 1}
    for body, num_cached in ((plain, 0), (scored, 0), (plain, 48)):
        usage = (await client.post(TEXT, json=body)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == num_cached
    siblings = (await client.post(TEXT, json={**scored, "prompt": [*range(200, 264)], "n": 2})).json()["usage"]
    assert siblings["prompt_tokens_details"]["cached_tokens"] == 48  # the second choice waits for the first one's prompt


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_scored_prompt_survives_the_death_of_its_replica_and_is_told_once(default_tokenizer: Tokenizer, num_choices: int) -> None:
    async with running_cluster(default_tokenizer, num_replicas=2) as cluster, client_of(cluster) as client:
        for replica in cluster.replicas:
            replica.engine.gate.clear()
        body = {"model": MODEL, "prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 20, "ignore_eos": True, "n": num_choices}
        call = asyncio.create_task(client.post(TEXT, json={**body, "stream": True}))
        while not any(replica.engine.has_work for replica in cluster.replicas):
            await asyncio.sleep(0.002)
        dying = next(replica for replica in cluster.replicas if replica.engine.has_work)
        dying.engine.tokens_left = 6 * num_choices
        for replica in cluster.replicas:
            replica.engine.gate.set()
        parts = [chunk["choices"][0] for chunk in events_of((await call).text)]
        for index in range(num_choices):
            own = [part for part in parts if part["index"] == index]
            logprobs = {name: [value for part in own for value in part["logprobs"][name]] for name in own[0]["logprobs"]}
            check_echo({"text": "".join(part["text"] for part in own), "logprobs": logprobs}, PROMPT, default_tokenizer, 20)
        assert cluster.records[-1].num_failovers >= 1


async def test_prompt_logprobs_extension_lists_every_prompt_token(client: httpx.AsyncClient, default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode("to be or not")
    answer = (await client.post(TEXT, json={"model": MODEL, "prompt": "to be or not", "prompt_logprobs": 2, "max_tokens": 1})).json()
    check_schema("CreateCompletionResponse", answer)
    first, *rest = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(ids) - 1
    for position, (token_id, entries) in enumerate(zip(ids[1:], rest, strict=True), 1):
        own = {"logprob": -float(position), "rank": 1, "decoded_token": default_tokenizer.token_text(token_id)}
        assert entries[str(token_id)] == own
        assert len(entries) == 2
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 0, "max_tokens": 1}
    chat_answer = (await client.post(CHAT, json=chat)).json()
    check_schema("CreateChatCompletionResponse", chat_answer)
    assert len(chat_answer["prompt_logprobs"]) == chat_answer["usage"]["prompt_tokens"]
    assert all(len(entries) == 1 for entries in chat_answer["prompt_logprobs"][1:])
    check_error(await client.post(CHAT, json={**chat, "stream": True}), 400, "prompt_logprobs")
    check_error(await client.post(CHAT, json={**chat, "prompt_logprobs": 21}), 400, "prompt_logprobs")


async def test_offsets_of_special_tokens_outside_the_text_take_no_room() -> None:
    tokenizer = small_tokenizer("byte_level")
    begin = tokenizer.encode("<s>")
    ids = [*begin, *tokenizer.encode("naïve text")]

    def make() -> EchoEngine:
        return EchoEngine(eos_token_id=min(tokenizer.eos_token_ids), vocab_size=tokenizer.vocab_size)

    async with running_cluster(tokenizer, make_engine=make) as cluster, client_of(cluster) as client:
        body = {"model": MODEL, "prompt": ids, "logprobs": 0, "max_tokens": len(ids)}
        (choice,) = (await client.post(TEXT, json=body)).json()["choices"]
    assert choice["text"] == "naïve text"
    pairs = list(zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True))
    assert pairs[:2] == [("<s>", 0), (tokenizer.token_text(ids[1]), 0)]
    for token, offset in pairs[1:]:
        if "\ufffd" not in token:
            assert choice["text"][offset : offset + len(token)] == token
