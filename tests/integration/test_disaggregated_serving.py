"""Pools of prefill and decode on Ray: the text of a unified model, whoever dies or leaves in whatever phase."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import AsyncOpenAI

from replicas.request import FinishReason, GenerationRequest
from replicas.sampling_params import SamplingParams
from replicas.serve.handles import over_grpc
from replicas.stats import HandoffStats
from tests.integration.conftest import MODEL
from tests.integration.deployed import Deployed, is_idle
from tests.prompts import mixed_texts

LEASE_S = 3.0
PATIENT_LEASE_S = 30.0
"""Where nothing is to be lost: connecting fifty pulls at once takes seconds on two busy cores."""
NUM_PROMPTS = 50
NUM_TOKENS = 24
STEP_TOKENS = 16  # so few that a long prompt takes its time
LONG_PROMPT = "A long tale of rivers and of those who live beside them, told again. " * 150
NUM_LONG = 8
"""Long prompts at once: enough that the router's view, a fraction of a second old, shows the prefill replica at work."""
NUM_LONG_TOKENS = 150
"""Of their answers: a kill with the first token finds most of them to come."""
RECOVERED_S = 60.0
PREFILL, DECODE = f"replica-{MODEL}-prefill", f"replica-{MODEL}-decode"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@contextmanager
def _deployed(
    port: int, model_dir: Path, app: str, *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **engine: Any
) -> Iterator[Deployed]:
    """`engine` is of both pools, `prefill` and `decode` are of one."""
    from ray import serve

    from cluster.app import build

    model = {
        "name": MODEL,
        "mode": "disaggregated",
        "num_cpus": 0.25,
        "engine": {
            "model": str(model_dir), "dtype": "float32", "kv_cache_bytes": 32 * 2**20, "num_threads": 1, "kv_lease_s": LEASE_S,
            "max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 16, **engine,
        },
        "prefill": {"engine": prefill or {}},
        "decode": {"engine": decode or {}},
    }  # fmt: skip
    # Round robin makes a pair of every request; by seconds, an idle decode replica would compute short prompts itself.
    serve.run(build({"models": [model], "router": {"policy": "round_robin"}}), name=app, route_prefix=f"/{app}")
    try:
        yield Deployed(port=port, app=app, model=MODEL, prefix=f"/{app}")
    finally:
        serve.delete(app)


@pytest.fixture(scope="module")
def pools(local_ray: int, tiny_model_dir: Path) -> Iterator[Deployed]:
    with _deployed(local_ray, tiny_model_dir, "pools") as app:
        yield app


@pytest.fixture
async def client(pools: Deployed) -> AsyncIterator[AsyncOpenAI]:
    async with _client_of(pools) as made:
        await pools.wait_until(lambda model: len(model["replicas"]) == 2 and is_idle(model), timeout_s=RECOVERED_S)
        yield made


@pytest.fixture
async def unified(deployed: Deployed) -> AsyncIterator[AsyncOpenAI]:
    async with _client_of(deployed) as made:
        await deployed.wait_until(lambda model: len(model["replicas"]) == 2, timeout_s=RECOVERED_S)
        yield made


@dataclass(frozen=True, slots=True, kw_only=True)
class UnifiedAnswers:
    """Owns the greedy answers that replicas without pools gave, each asked for once."""

    texts: dict[tuple[str, int], str] = field(default_factory=dict)  # prompt, number of tokens -> answer

    async def of(self, client: AsyncOpenAI, prompts: list[str], num_tokens: int) -> list[str]:
        missing = [prompt for prompt in prompts if (prompt, num_tokens) not in self.texts]
        answers = await asyncio.gather(*(_streamed(client, prompt, asyncio.Event(), num_tokens) for prompt in missing))
        self.texts.update({(prompt, num_tokens): answer for prompt, answer in zip(missing, answers, strict=True)})
        return [self.texts[prompt, num_tokens] for prompt in prompts]


@pytest.fixture(scope="module")
def unified_answers() -> UnifiedAnswers:
    return UnifiedAnswers()


def _client_of(app: Deployed) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0, timeout=90)


async def _complete(client: AsyncOpenAI, prompt: str, **options: Any) -> Any:
    return await client.completions.create(model=MODEL, prompt=prompt, **options)


async def _streamed(client: AsyncOpenAI, prompt: str, started: asyncio.Event, max_tokens: int) -> str:
    text = ""
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "extra_body": {"ignore_eos": True}}
    async for chunk in await client.completions.create(model=MODEL, prompt=prompt, stream=True, **options):
        text += chunk.choices[0].text
        started.set()
    return text


async def _handoffs(app: Deployed, deployment: str) -> HandoffStats:
    """Of the one replica of a pool."""
    return (await asyncio.to_thread(lambda: _handle(app, deployment).stats.remote().result(timeout_s=20))).handoffs


def _handle(app: Deployed, deployment: str) -> Any:
    """With a loop of its own: that of a test ends before Serve's tasks in it do."""
    from ray import serve

    handle = serve.get_deployment_handle(deployment, app.app)
    if not handle.is_initialized:  # Serve gives the same one again
        handle._init(_run_router_in_separate_loop=True)
    return over_grpc(handle)


def _replica(model: dict[str, Any], role: str) -> dict[str, Any]:
    return next((one for one in model["replicas"].values() if one["role"] == role), {"num_running": 0})


def _runs_in(role: str) -> Callable[[dict[str, Any]], bool]:
    return lambda model: _replica(model, role)["num_running"] > 0


async def test_chat_on_a_pair_streamed_and_whole_equals_unified(client: AsyncOpenAI, unified: AsyncOpenAI, pools: Deployed) -> None:
    before = await _handoffs(pools, DECODE)
    messages: Any = [{"role": "user", "content": "Tell me about rivers."}]
    options: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 40, "seed": 5, "n": 2, "logprobs": True}
    expected = await unified.chat.completions.create(**options)
    whole = await client.chat.completions.create(**options)
    assert [one.message.content for one in whole.choices] == [one.message.content for one in expected.choices]
    assert [len(one.logprobs.content) for one in whole.choices] == [len(one.logprobs.content) for one in expected.choices]
    texts = ["", ""]
    async for chunk in await client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [one.message.content for one in expected.choices]
    after = await _handoffs(pools, DECODE)
    assert (after.num_loads - before.num_loads, after.num_recomputes) == (4, before.num_recomputes)
    assert after.num_bytes > before.num_bytes


@pytest.mark.parametrize(("num_prefill_ranks", "num_decode_ranks"), [(2, 1), (1, 2)])
async def test_fifty_prompts_equal_unified(
    local_ray: int,
    tiny_model_dir: Path,
    unified: AsyncOpenAI,
    unified_answers: UnifiedAnswers,
    num_prefill_ranks: int,
    num_decode_ranks: int,
) -> None:
    prompts = mixed_texts(13)[:NUM_PROMPTS]
    options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}
    expected = await unified_answers.of(unified, prompts, NUM_TOKENS)
    name = f"golden-{num_prefill_ranks}-{num_decode_ranks}"
    prefill, decode = {"tensor_parallel_size": num_prefill_ranks}, {"tensor_parallel_size": num_decode_ranks}
    with _deployed(local_ray, tiny_model_dir, name, prefill=prefill, decode=decode, kv_lease_s=PATIENT_LEASE_S) as app:
        await app.wait_until(lambda model: len(model["replicas"]) == 2, timeout_s=RECOVERED_S)
        async with _client_of(app) as client:
            for _ in ("cold", "hot"):
                answers = await asyncio.gather(*(_complete(client, text, **options) for text in prompts))
                assert [answer.choices[0].text for answer in answers] == expected
        loaded = await _handoffs(app, DECODE)
        view = await app.wait_until(is_idle)
        assert (loaded.num_loads, loaded.num_recomputes) == (view["num_plans"]["pair"], 0)
        assert loaded.num_loads > NUM_PROMPTS, "a pair was meant to be the rule, not what takes over when a pool is full"


async def test_object_store_alone_carries_the_kv(local_ray: int, tiny_model_dir: Path, unified: AsyncOpenAI) -> None:
    prompts = mixed_texts(2)
    options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0}
    expected = [answer.choices[0].text for answer in await asyncio.gather(*(_complete(unified, text, **options) for text in prompts))]
    ranks = {"tensor_parallel_size": 2}
    with _deployed(local_ray, tiny_model_dir, "stored", prefill=ranks, kv_transfer="object-store", kv_lease_s=PATIENT_LEASE_S) as app:
        await app.wait_until(lambda model: len(model["replicas"]) == 2, timeout_s=RECOVERED_S)
        async with _client_of(app) as client:
            answers = await asyncio.gather(*(_complete(client, text, **options) for text in prompts))
        assert [answer.choices[0].text for answer in answers] == expected
        loaded = await _handoffs(app, DECODE)
        view = await app.wait_until(is_idle)
        assert (loaded.num_loads, loaded.num_recomputes) == (view["num_plans"]["pair"], 0)
        assert loaded.num_bytes > 0


async def test_explanation_of_an_answer_shows_its_pair(client: AsyncOpenAI, pools: Deployed) -> None:
    answer = await _complete(client, "explain this", max_tokens=2)
    replicas = (await pools.view())["replicas"]
    (decision,) = await pools.explain(answer.id)
    assert [replicas[decision[side]]["role"] for side in ("prefill_replica", "replica")] == ["prefill", "decode"]


@pytest.mark.parametrize("moment", ["prefill", "decode"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_killed_side_is_only_a_pause(
    client: AsyncOpenAI, unified: AsyncOpenAI, unified_answers: UnifiedAnswers, pools: Deployed, side: str, moment: str
) -> None:
    prompts = [f"{index} {LONG_PROMPT}" for index in range(NUM_LONG)]
    expected = await unified_answers.of(unified, prompts, NUM_LONG_TOKENS)
    pid = pools.pid_of({"prefill": PREFILL, "decode": DECODE}[side])
    started = [asyncio.Event() for _ in prompts]
    streams = [
        asyncio.create_task(_streamed(client, prompt, event, NUM_LONG_TOKENS)) for prompt, event in zip(prompts, started, strict=True)
    ]
    if moment == "prefill":
        await pools.wait_until(_runs_in("prefill"))
        assert not all(event.is_set() for event in started), "the prompts are too short to be caught"
    else:
        await started[0].wait()
    os.kill(pid, signal.SIGKILL)
    assert await asyncio.gather(*streams) == expected
    await pools.wait_until(lambda model: len(model["replicas"]) == 2 and is_idle(model), timeout_s=RECOVERED_S)


async def test_prefill_replica_that_hangs_is_only_a_pause(client: AsyncOpenAI, unified: AsyncOpenAI, pools: Deployed) -> None:
    prompts = [f"hung {index} {LONG_PROMPT}" for index in range(NUM_LONG)]
    expected = await asyncio.gather(*(_streamed(unified, prompt, asyncio.Event(), 100) for prompt in prompts))
    pid = pools.pid_of(PREFILL)
    streams = [asyncio.create_task(_streamed(client, prompt, asyncio.Event(), 100)) for prompt in prompts]
    await pools.wait_until(_runs_in("prefill"))
    os.kill(pid, signal.SIGSTOP)
    try:
        assert await asyncio.gather(*streams) == expected
    finally:
        os.kill(pid, signal.SIGCONT)
    await pools.wait_until(lambda model: len(model["replicas"]) == 2 and is_idle(model), timeout_s=RECOVERED_S)


@pytest.mark.parametrize("moment", ["prefill", "decode"])
async def test_client_that_leaves_frees_both_sides_within_a_lease(client: AsyncOpenAI, pools: Deployed, moment: str) -> None:
    body = {"model": MODEL, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    prompts = [f"{index} {moment} {LONG_PROMPT}" for index in range(NUM_LONG)]
    async with httpx.AsyncClient(timeout=60) as http:
        tasks = [asyncio.create_task(http.post(f"{pools.url}/v1/completions", json={**body, "prompt": prompt})) for prompt in prompts]
        await pools.wait_until(_runs_in(moment))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await pools.wait_until(is_idle, timeout_s=LEASE_S + 2)
    for deployment in (PREFILL, DECODE):
        assert (await _handoffs(pools, deployment)).num_leases == 0


async def test_prefill_replica_that_is_stopped_holds_what_it_handed_over_for_a_lease(client: AsyncOpenAI, pools: Deployed) -> None:
    """The last test of this application: it ends with it."""
    from ray import serve

    request = GenerationRequest(
        request_id="nobody-takes-it", prompt_ids=tuple(range(100, 200)), params=SamplingParams(max_tokens=5), seed=0, wants_handoff=True
    )
    stream = _handle(pools, PREFILL).options(stream=True).generate
    endings = await asyncio.to_thread(lambda: [item.finish_reason for item in stream.remote(request)])
    handed_over_s = time.monotonic()
    assert endings[-1] is FinishReason.HANDOFF
    assert (await _handoffs(pools, PREFILL)).num_leases == 1
    process = psutil.Process(pools.pid_of(PREFILL))
    serve.delete(pools.app, _blocking=False)
    await asyncio.to_thread(process.wait, RECOVERED_S)
    assert LEASE_S <= time.monotonic() - handed_over_s < LEASE_S + 8, "it should live until the lease expires, and no longer"
