"""The HTTP surface over an echo engine: the answer to a prompt is the prompt."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from cluster.failures import RouterGone
from cluster.settings.failover import FailoverPolicy
from cluster.settings.gateway_config import GatewayConfig
from replicas.text.tokenizer import Tokenizer
from router.config import RouterConfig
from tests.unit.in_process_cluster import CHAT, MODEL, TEXT, InProcessCluster, client_of, events_of, running_cluster
from tests.unit.openai_schemas import check_schema


async def test_completion_whole_says_the_prompt_back(client: httpx.AsyncClient) -> None:
    response = await client.post(TEXT, json={"model": MODEL, "prompt": "The quick brown fox", "max_tokens": 50})
    assert response.status_code == 200
    body = response.json()
    check_schema("CreateCompletionResponse", body)
    assert body["choices"][0]["text"] == "The quick brown fox"
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_completion_max_tokens_cuts_with_length(client: httpx.AsyncClient, default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode("one two three four five")
    response = await client.post(TEXT, json={"model": MODEL, "prompt": ids, "max_tokens": 3})
    body = response.json()
    assert body["choices"][0]["text"] == default_tokenizer.decode(ids[:3])
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3
    assert body["usage"]["prompt_tokens"] == len(ids)


async def test_chat_stream_concatenates_to_the_whole(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "Żółć 你好 🎉"}]
    body = {"model": MODEL, "messages": messages, "stream_options": {"include_usage": True}, "ignore_eos": True, "max_tokens": 60}
    whole = (await client.post(CHAT, json={key: value for key, value in body.items() if key != "stream_options"})).json()
    check_schema("CreateChatCompletionResponse", whole)
    chunks = events_of((await client.post(CHAT, json={**body, "stream": True})).text)
    for chunk in chunks:
        check_schema("CreateChatCompletionStreamResponse", chunk)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert "Żółć 你好 🎉" in text
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_completion_several_prompts_and_choices_are_numbered_in_order(client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": ["first", "second", "third"], "n": 2, "max_tokens": 20}
    choices = (await client.post(TEXT, json=body)).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"] for choice in choices] == ["first", "first", "second", "second", "third", "third"]
    chunks = events_of((await client.post(TEXT, json={**body, "stream": True})).text)
    texts = [""] * 6
    for chunk in chunks:
        check_schema("CreateCompletionResponse", _closed(chunk))
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["first", "first", "second", "second", "third", "third"]


def _closed(chunk: dict[str, Any]) -> dict[str, Any]:
    """The description has one schema for answer and chunk, whose finish_reason may not be null as OpenAI's own chunks have it."""
    choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
    return {**chunk, "choices": choices}


async def test_completion_echo_puts_the_prompt_before_the_answer(client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "ping", "echo": True, "max_tokens": 10}
    assert (await client.post(TEXT, json=body)).json()["choices"][0]["text"] == "pingping"
    chunks = events_of((await client.post(TEXT, json={**body, "stream": True})).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "pingping"


async def test_completion_zero_tokens_echoes_without_running(client: httpx.AsyncClient, cluster: InProcessCluster) -> None:
    response = await client.post(TEXT, json={"model": MODEL, "prompt": "ping", "echo": True, "max_tokens": 0})
    choice = response.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ping", "length")
    assert cluster.replicas[0].engine.stats().num_steps == 0


async def test_stop_string_never_shows_and_ends_the_request(client: httpx.AsyncClient, cluster: InProcessCluster) -> None:
    body = {"model": MODEL, "prompt": "alpha beta STOP gamma", "stop": ["STOP"], "max_tokens": 1000, "ignore_eos": True}
    whole = (await client.post(TEXT, json=body)).json()
    assert whole["choices"][0]["text"] == "alpha beta "
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["stop_reason"] == "STOP"
    chunks = events_of((await client.post(TEXT, json={**body, "stream": True})).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "alpha beta "
    await cluster.wait_idle()


async def test_chat_logprobs_name_token_bytes_and_alternatives(client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2, "max_tokens": 4}
    whole = (await client.post(CHAT, json=body)).json()
    check_schema("CreateChatCompletionResponse", whole)
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    assert content[0]["logprob"] == -0.5
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -0.75]
    assert bytes(content[1]["bytes"]).decode() == content[1]["token"]
    chunks = events_of((await client.post(CHAT, json={**body, "stream": True})).text)
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content


async def test_completion_logprobs_offsets_point_into_the_text(client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "one two three", "logprobs": 1, "max_tokens": 3}
    choice = (await client.post(TEXT, json=body)).json()["choices"][0]
    logprobs = choice["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    assert logprobs["token_logprobs"] == [-0.5] * 3


async def test_models_are_listed_and_found(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    check_schema("ListModelsResponse", listed)
    assert [card["id"] for card in listed["data"]] == [MODEL]
    found = (await client.get(f"/v1/models/{MODEL}")).json()
    check_schema("Model", found)
    assert (await client.get("/v1/models/nobody")).status_code == 404


async def test_tokenize_and_detokenize_are_inverse(client: httpx.AsyncClient, default_tokenizer: Tokenizer) -> None:
    text = "Grüße, 世界!"
    answer = (await client.post("/tokenize", json={"model": MODEL, "prompt": text, "return_token_strs": True})).json()
    assert answer["tokens"] == default_tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert (await client.post("/detokenize", json={"model": MODEL, "tokens": answer["tokens"]})).json() == {"prompt": text}
    chat = (await client.post("/tokenize", json={"model": MODEL, "messages": [{"role": "user", "content": text}]})).json()
    assert chat["tokens"] == default_tokenizer.chat_prompt_ids([{"role": "user", "content": text}])


async def test_health_and_version_answer(client: httpx.AsyncClient) -> None:
    health = await client.get("/health")
    assert health.status_code == 200
    assert health.json() == {"status": "ok", "models": [MODEL], "loading": [], "unavailable": []}
    assert "version" in (await client.get("/version")).json()
    assert (await client.get("/debug/router")).status_code == 200


async def test_request_id_comes_back_and_an_unsafe_one_is_replaced(client: httpx.AsyncClient, cluster: InProcessCluster) -> None:
    response = await client.get("/version", headers={"X-Request-Id": "abc-123"})
    assert response.headers["x-request-id"] == "abc-123"
    response = await client.get("/version", headers={"X-Request-Id": "bad id with spaces"})
    assert response.headers["x-request-id"].startswith("req-")
    assert cluster.records[0].request_id == "abc-123"


async def test_access_record_tells_cost_and_ending(client: httpx.AsyncClient, cluster: InProcessCluster) -> None:
    body = {"model": MODEL, "prompt": "one two three", "user": "ann", "max_tokens": 20, "stream": True}
    await client.post(TEXT, json=body, headers={"X-Tenant": "acme"})
    record = cluster.records[-1]
    assert (record.tenant, record.user, record.model, record.status) == ("acme", "ann", MODEL, 200)
    assert record.num_prompt_tokens == 3
    assert record.num_output_tokens == 4
    assert record.finish_reasons == ["stop"]
    assert record.replicas == ["replica-0"]
    assert record.prompt is None
    assert record.ttft_s is not None
    assert record.duration_s is not None
    assert record.ttft_s <= record.duration_s


async def test_cached_prompt_tokens_are_told(client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "word " * 100, "max_tokens": 2}
    first = (await client.post(TEXT, json=body)).json()["usage"]
    second = (await client.post(TEXT, json=body)).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 16 * ((second["prompt_tokens"] - 1) // 16)


async def test_cached_tokens_of_several_prompts_add_up(client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": ["word " * 100, "other " * 100], "max_tokens": 2}
    await client.post(TEXT, json=body)
    usage = (await client.post(TEXT, json=body)).json()["usage"]
    num_each = usage["prompt_tokens"] // 2
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * 16 * ((num_each - 1) // 16)


async def test_replica_death_in_mid_stream_is_only_a_pause(default_tokenizer: Tokenizer) -> None:
    prompt = " ".join(str(number) for number in range(200))
    async with running_cluster(default_tokenizer, num_replicas=2) as cluster, client_of(cluster) as client:
        cluster.replicas[0].engine.tokens_left = 100
        responses = await asyncio.gather(
            *(client.post(TEXT, json={"model": MODEL, "prompt": prompt, "max_tokens": 1000, "stream": True}) for _ in range(2))
        )
        for response in responses:
            assert "".join(chunk["choices"][0]["text"] for chunk in events_of(response.text)) == prompt
        assert sum(record.num_failovers for record in cluster.records) >= 1


async def test_death_of_the_only_replica_is_a_pause_until_it_is_back(default_tokenizer: Tokenizer) -> None:
    prompt = " ".join(str(number) for number in range(200))
    config = GatewayConfig(failover=FailoverPolicy(replica_timeout_s=30.0))
    router_config = RouterConfig(no_replica_timeout_s=0.02)
    async with running_cluster(default_tokenizer, config=config, router_config=router_config) as cluster, client_of(cluster) as client:
        cluster.replicas[0].engine.tokens_left = 100
        stream = asyncio.create_task(client.post(TEXT, json={"model": MODEL, "prompt": prompt, "max_tokens": 1000, "stream": True}))
        async with asyncio.timeout(30):
            while (await cluster.backend.describe_router())[MODEL]["replicas"]:
                await asyncio.sleep(0.002)  # nothing tells of the router's view
            assert (await client.post(TEXT, json={"model": MODEL, "prompt": "x", "max_tokens": 1})).status_code == 503
        await cluster.add_replica()
        assert "".join(chunk["choices"][0]["text"] for chunk in events_of((await stream).text)) == prompt


async def test_health_of_a_model_whose_replicas_are_gone_is_503_until_one_is_back(default_tokenizer: Tokenizer) -> None:
    async with running_cluster(default_tokenizer) as cluster, client_of(cluster) as client:
        cluster.replicas[0].engine.tokens_left = 0
        stream = asyncio.create_task(client.post(TEXT, json={"model": MODEL, "prompt": "x y z", "max_tokens": 9, "stream": True}))
        async with asyncio.timeout(30):
            while (health := await client.get("/health")).status_code == 200:
                await asyncio.sleep(0.002)  # nothing tells of the router's view
        assert health.json() == {"status": "unavailable", "models": [], "loading": [], "unavailable": [MODEL]}
        await cluster.add_replica()
        assert (await client.get("/health")).status_code == 200
        await stream


async def test_health_is_503_while_the_router_does_not_answer(
    client: httpx.AsyncClient, cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nobody() -> dict[str, int]:
        raise RouterGone("it does not answer")

    monkeypatch.setattr(cluster.backend, "num_serving", nobody)
    health = await client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "unavailable")
    assert health.json()["reason"] == "the router: it does not answer"


async def test_choice_whose_replica_stays_away_ends_with_an_error_event(default_tokenizer: Tokenizer) -> None:
    config = GatewayConfig(failover=FailoverPolicy(replica_timeout_s=0.01))
    router_config = RouterConfig(no_replica_timeout_s=0.02)
    async with running_cluster(default_tokenizer, config=config, router_config=router_config) as cluster, client_of(cluster) as client:
        cluster.replicas[0].engine.tokens_left = 10
        response = await client.post(TEXT, json={"model": MODEL, "prompt": "word " * 100, "max_tokens": 100, "stream": True})
        last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == "unavailable"


async def test_explain_tells_why_a_request_went_where_it_went(default_tokenizer: Tokenizer) -> None:
    async with running_cluster(default_tokenizer, num_replicas=2) as cluster, client_of(cluster) as client:
        answer = (await client.post(TEXT, json={"model": MODEL, "prompt": ["a b c", "d e f"], "max_tokens": 3})).json()
        body = (await client.get(f"/debug/router/explain/{answer['id']}")).json()
        assert [one["request_id"] for one in body["answers"]] == [f"{answer['id']}-0", f"{answer['id']}-1"]
        for one in body["answers"]:
            costs = {candidate["replica"]: candidate["cost_s"] for candidate in one["candidates"]}
            assert list(costs.values()) == sorted(costs.values())
            assert costs[one["replica"]] == pytest.approx(min(costs.values()), abs=1e-3)  # ties go by the prefix
            assert one["candidates"][0]["cost_s"] == pytest.approx(sum(one["candidates"][0]["terms"].values()), abs=1e-3)
        missing = await client.get("/debug/router/explain/nobody")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "decision_not_found"
        assert "No decision on 'nobody' is kept" in missing.json()["error"]["message"]
        assert "not X-Request-Id" in missing.json()["error"]["message"]


async def test_priority_header_sets_the_tier_and_a_wrong_one_is_refused(default_tokenizer: Tokenizer) -> None:
    async with running_cluster(default_tokenizer) as cluster, client_of(cluster) as client:
        refused = await client.post(TEXT, json={"model": MODEL, "prompt": "a"}, headers={"X-Priority": "high"})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "X-Priority"
        cluster.replicas[0].engine.gate.clear()
        calls = [
            asyncio.create_task(client.post(TEXT, json={"model": MODEL, "prompt": "x", "max_tokens": 2}, headers={"X-Priority": str(p)}))
            for p in [0] * 20 + [7] * 5
        ]
        async with asyncio.timeout(30):
            while "7" not in (await cluster.backend.describe_router()).get(MODEL, {}).get("tiers", {}):
                await asyncio.sleep(0.002)
        cluster.replicas[0].engine.gate.set()
        assert {response.status_code for response in await asyncio.gather(*calls)} == {200}
