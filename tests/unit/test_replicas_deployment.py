"""The replica's shell without Serve: what it adds to the engine that it holds."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from replicas.deployment import ReplicaDeployment
from replicas.engine.async_engine import AsyncEngine
from replicas.request import GenerationRequest
from replicas.sampling_params import SamplingParams
from tests.unit.fake_engine import EchoEngine


async def test_closing_a_stream_cancels_its_request_before_the_close_returns() -> None:
    echo = EchoEngine(eos_token_id=0, vocab_size=100)
    engine = AsyncEngine(lambda: echo)
    await engine.start()
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    request = GenerationRequest(request_id="a", prompt_ids=(1, 2, 3), params=params, seed=0)
    # In place of the shell itself, whose finalizer only Serve may call, stands what its method needs of it.
    stream = ReplicaDeployment.func_or_class.generate(SimpleNamespace(_engine=engine), request)
    await anext(stream)
    await stream.aclose()
    assert engine.cancel("a") == 0, "the request still runs"
    async with asyncio.timeout(30):
        await engine.shutdown()
