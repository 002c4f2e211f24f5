"""Drafts as HTTP clients see them: a predicted answer, its tokens in the usage, and none at all on request."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from replicas.text.tokenizer import Tokenizer
from tests.unit.in_process_cluster import CHAT, MODEL, TEXT, InProcessCluster
from tests.unit.openai_schemas import check_schema


async def chat(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(CHAT, json={"model": MODEL, "messages": [{"role": "user", "content": "one two three"}], **fields})
    assert response.status_code == 200, response.text
    check_schema("CreateChatCompletionResponse", response.json())
    return dict(response.json())


def predicted(body: dict[str, Any]) -> tuple[int, int]:
    details = body["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@pytest.mark.parametrize("as_parts", [False, True])
async def test_predicted_answer_is_the_same_and_its_tokens_are_in_the_usage(client: httpx.AsyncClient, as_parts: bool) -> None:
    plain = await chat(client)
    text = plain["choices"][0]["message"]["content"]
    content = [{"type": "text", "text": text}] if as_parts else text
    found = await chat(client, prediction={"type": "content", "content": content})
    assert found["choices"] == plain["choices"]
    assert found["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    accepted, _ = predicted(found)  # control tokens, which the text does not show, are rejected ones
    assert predicted(plain) == (0, 0)
    assert found["usage"]["completion_tokens"] / 2 < accepted < found["usage"]["completion_tokens"]


async def test_prediction_that_is_wrong_is_counted_as_rejected(client: httpx.AsyncClient, default_tokenizer: Tokenizer) -> None:
    first_ids = default_tokenizer.encode((await chat(client))["choices"][0]["message"]["content"])[:3]
    wrong = default_tokenizer.decode(first_ids) + " something else entirely"
    accepted, rejected = predicted(await chat(client, prediction={"type": "content", "content": wrong}))
    assert accepted <= 1
    assert rejected > 0


async def test_empty_prediction_asks_for_nothing(client: httpx.AsyncClient, cluster: InProcessCluster) -> None:
    await chat(client, prediction={"type": "content", "content": ""})
    assert cluster.backend.sent[-1].predicted_ids == ()


@pytest.mark.parametrize(("fields", "speculates"), [({}, True), ({"speculation": "auto"}, True), ({"speculation": "off"}, False)])
async def test_request_can_do_without_drafts(
    client: httpx.AsyncClient, cluster: InProcessCluster, fields: dict[str, Any], speculates: bool
) -> None:
    body = await chat(client, **fields)
    await client.post(TEXT, json={"model": MODEL, "prompt": "one two", **fields})
    assert [request.speculates for request in cluster.backend.sent] == [speculates, speculates]
    text = body["choices"][0]["message"]["content"]
    again = await chat(client, prediction={"type": "content", "content": text}, **fields)
    assert (predicted(again)[0] > 0) == speculates
