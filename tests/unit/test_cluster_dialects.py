"""A dialect that nobody has: with its path, body, events and errors in this module alone, all of the gateway serves it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from cluster.failures import BadRequest, ErrorAnswer
from cluster.generation.choice_delta import ChoiceDelta
from cluster.generation.prepared_generation import PreparedGeneration, prepare_generation
from cluster.generation.request_context import RequestContext
from cluster.generation.usage import Usage
from cluster.models.served_model import ServedModel
from cluster.protocols.dialects import DIALECTS
from cluster.settings.gateway_config import GatewayConfig
from cluster.settings.limits import RequestLimits
from replicas.sampling_params import SamplingParams
from replicas.text.tokenizer import Tokenizer
from router.config import RouterConfig
from tests.unit.http_server import serving
from tests.unit.in_process_cluster import MODEL, TEXT, InProcessCluster, client_of, running_cluster

SAY = "/say"
_NUMBERS = itertools.count()


class Telegram:
    """Bodies are "model STOP words", with " STOP slowly" behind them for a stream. Words may be five at most."""

    path = SAY

    def parse(self, body: bytes, limits: RequestLimits) -> Telegrammed:
        parts = body.decode().split(" STOP ")
        if len(parts) not in (2, 3):
            raise BadRequest("a telegram needs a STOP", param="words", code="no_stop")
        return Telegrammed(parts[0], parts[1], len(parts) == 3)

    def error_body(self, answer: ErrorAnswer) -> dict[str, Any]:
        return {"regret": answer.message, "because": answer.kind.value, "about": answer.param}

    def error_event(self, answer: ErrorAnswer) -> bytes:
        return b"event: regret\ndata: " + answer.kind.value.encode() + b"\n\n"


@dataclass
class Telegrammed:
    model: str
    prompt: str
    is_slow: bool
    user: str | None = None

    async def prepare(self, model: ServedModel, context: RequestContext) -> Draft:
        prompts = [tuple(await model.encode(self.prompt))]
        params = SamplingParams(max_tokens=1000 if "endless" in self.prompt else 20, ignore_eos="endless" in self.prompt)
        return Draft(
            prepare_generation(
                context, model, response_id=f"telegram-{next(_NUMBERS)}", prompts=prompts, params=params, stream=self.is_slow
            )
        )


@dataclass
class Draft:
    generation: PreparedGeneration

    def stream_writer(self) -> Sounder:
        return Sounder()

    def answer_writer(self) -> Paper:
        return Paper([])


class Sounder:
    def start(self) -> bytes:
        return b"event: open\ndata:\n\n"

    def delta(self, delta: ChoiceDelta) -> bytes:
        return f"event: tap\ndata: {json.dumps(delta.text)}\n\n".encode()

    def end(self, usage: Usage) -> bytes:
        return f"event: close\ndata: {usage.num_output_tokens}\n\n".encode()


@dataclass
class Paper:
    texts: list[str]

    def add(self, delta: ChoiceDelta) -> None:
        self.texts.append(delta.text)

    def body(self, usage: Usage) -> dict[str, Any]:
        return {"words": "".join(self.texts), "price": usage.num_prompt_tokens + usage.num_output_tokens}


@pytest.fixture
async def cluster(default_tokenizer: Tokenizer) -> AsyncIterator[InProcessCluster]:
    config = GatewayConfig(limits=RequestLimits(max_body_bytes=1000), log_prompts=True)
    async with running_cluster(
        default_tokenizer, config=config, router_config=RouterConfig(max_queue_requests=1), dialects=(*DIALECTS, Telegram())
    ) as running:
        yield running


async def test_whole_answer_has_the_dialects_shape(
    client: httpx.AsyncClient, cluster: InProcessCluster, default_tokenizer: Tokenizer
) -> None:
    answer = await client.post(SAY, content=f"{MODEL} STOP come home")
    num_tokens = len(default_tokenizer.encode("come home"))
    assert (answer.status_code, answer.json()) == (200, {"words": "come home", "price": 2 * num_tokens + 1})
    record = cluster.records[-1]
    assert (record.model, record.prompt, record.status) == (MODEL, "come home", 200)
    assert str(record.response_id).startswith("telegram-")
    assert (record.num_prompt_tokens, record.num_output_tokens, record.finish_reasons) == (num_tokens, num_tokens + 1, ["stop"])


async def test_stream_has_the_dialects_events_and_end(client: httpx.AsyncClient, default_tokenizer: Tokenizer) -> None:
    answer = await client.post(SAY, content=f"{MODEL} STOP come home STOP slowly")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [event.removeprefix("event: ").split("\ndata:") for event in answer.text.strip("\n").split("\n\n")]
    assert events[0][0] == "open"
    assert "".join(json.loads(data) for name, data in events if name == "tap") == "come home"
    assert events[-1] == ["close", f" {len(default_tokenizer.encode('come home')) + 1}"]


@pytest.mark.parametrize(
    ("body", "status", "kind", "param"),
    [
        (b"no such thing", 400, "invalid_request", "words"),
        (b"nobody STOP hello", 404, "not_found", "model"),
        (b"x" * 2000, 413, "too_large", None),
    ],
)
async def test_errors_are_written_in_the_dialects_shape(
    client: httpx.AsyncClient, cluster: InProcessCluster, body: bytes, status: int, kind: str, param: str | None
) -> None:
    answer = await client.post(SAY, content=body)
    assert answer.status_code == status
    assert set(answer.json()) == {"regret", "because", "about"}
    assert (answer.json()["because"], answer.json()["about"]) == (kind, param)
    assert cluster.records[-1].error is not None


async def test_full_queue_is_told_in_each_requests_own_dialect(client: httpx.AsyncClient, cluster: InProcessCluster) -> None:
    engine = cluster.replicas[0].engine
    engine.gate.clear()
    body = {"model": MODEL, "prompt": "come home", "max_tokens": 5}
    calls = [asyncio.create_task(client.post(TEXT, json=body)) for _ in range(30)]
    calls += [asyncio.create_task(client.post(SAY, content=f"{MODEL} STOP come home")) for _ in range(30)]
    num_refused, open_calls = 0, set(calls)
    async with asyncio.timeout(30):
        while num_refused <= 30:  # so that there are some of each
            done, open_calls = await asyncio.wait(open_calls, return_when=asyncio.FIRST_COMPLETED)
            num_refused += len(done)
    engine.gate.set()
    refused = [answer for answer in await asyncio.gather(*calls) if answer.status_code == 429]
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert {answer.json()["error"]["type"] for answer in refused if answer.url.path == TEXT} == {"rate_limit_error"}
    assert {answer.json()["because"] for answer in refused if answer.url.path == SAY} == {"rate_limit"}


async def test_stream_that_fails_midway_ends_with_the_dialects_error_event(default_tokenizer: Tokenizer) -> None:
    async with (
        running_cluster(default_tokenizer, router_config=RouterConfig(no_replica_timeout_s=0.02), dialects=(Telegram(),)) as cluster,
        serving(cluster.app) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        engine = cluster.replicas[0].engine
        engine.close_gate_after = 20
        async with client.stream("POST", SAY, content=f"{MODEL} STOP endless STOP slowly") as answer:
            texts = answer.aiter_text()
            text = await anext(texts)
            engine.tokens_left = 0
            engine.gate.set()
            text += "".join([more async for more in texts])
    assert answer.status_code == 200
    assert text.startswith("event: open\n")
    assert text.endswith("event: regret\ndata: unavailable\n\n")


async def test_path_that_no_dialect_has_is_answered_by_the_default_one(default_tokenizer: Tokenizer) -> None:
    async with running_cluster(default_tokenizer, dialects=(Telegram(),)) as cluster, client_of(cluster) as client:
        missing, wrong_method = await client.post(TEXT, json={}), await client.get(SAY)
    assert [missing.status_code, wrong_method.status_code] == [404, 405]
    assert [answer.json()["error"]["code"] for answer in (missing, wrong_method)] == ["unknown_url", "method_not_allowed"]
