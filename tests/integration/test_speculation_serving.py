"""Speculation over `serve deploy`: the same answers, a predicted one in the usage, and what the router shows of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.integration.deployed import Deployed

APP = "speculating"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def speculating(local_ray: int, tiny_model_dir: Path) -> Any:
    from ray import serve

    from cluster.app import build

    engine = {"model": str(tiny_model_dir), "dtype": "float32", "kv_cache_bytes": 32 * 2**20, "num_threads": 1}
    engine["speculative_config"] = {"method": "suffix", "num_speculative_tokens": 6}
    serve.run(build({"models": [{"name": APP, "num_cpus": 0.2, "engine": engine}]}), name=APP, route_prefix=f"/{APP}")
    yield Deployed(port=local_ray, app=APP, model=APP, prefix=f"/{APP}")
    serve.delete(APP)


@pytest.fixture
async def client(speculating: Deployed) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{speculating.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        await speculating.wait_until(lambda model: len(model["replicas"]) == 1, timeout_s=60)
        yield made


async def test_drafts_change_no_answer_and_are_shown(client: AsyncOpenAI, speculating: Deployed) -> None:
    async def answer(temperature: float, **extra: Any) -> Any:
        return await client.chat.completions.create(
            model=APP, messages=[{"role": "user", "content": "one two three one two three"}], max_tokens=60, seed=4,
            temperature=temperature, frequency_penalty=0.2, extra_body={"ignore_eos": True, **extra},
        )  # fmt: skip

    for temperature in (0.0, 0.8):
        plain = (await answer(temperature, speculation="off")).choices[0].message.content
        assert (await answer(temperature)).choices[0].message.content == plain
        predicted = await answer(temperature, prediction={"type": "content", "content": plain})
        assert predicted.choices[0].message.content == plain
    details = predicted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0
    view = await speculating.wait_until(lambda model: any(one["tokens_per_pass"] for one in model["replicas"].values()))
    (replica,) = view["replicas"].values()
    assert replica["tokens_per_pass"]["prediction"] >= 1
    assert replica["speculation_gain"] >= 1
