"""Choices over real engines that hand over in one process, in float32: a pair says what one engine says, whatever is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.failures import ReplicaDied, ReplicaHung, ReplicaLeft
from replicas.handoff.handoffs import Handoffs
from replicas.sampling_params import SamplingParams
from replicas.text.tokenizer import Tokenizer
from tests.tiny_llama import generated_by_transformers, save_tiny_llama, shared_prompts
from tests.unit.pair_fleet import MODEL, EngineBackend, Fleet

NUM_PROMPTS, NUM_OUTPUT = 16, 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, frequency_penalty=0.4, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
async def fleet(request: pytest.FixtureRequest, folder: Path, default_tokenizer: Tokenizer) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        made = Fleet(default_tokenizer, request.param)
        await made.start(folder, stack)
        yield made


def counters(fleet: Fleet, replica_id: str) -> Any:
    handoffs = fleet.engines[replica_id].handoffs
    assert isinstance(handoffs, Handoffs)
    return handoffs.counters


@pytest.mark.parametrize("fleet", [30.0], indirect=True, ids=[""])
async def test_prompts_at_once_equal_transformers(fleet: Fleet, folder: Path) -> None:
    prompts = shared_prompts(NUM_PROMPTS)
    backend = EngineBackend(fleet.replicas)
    answers = await asyncio.gather(*(fleet.answer(backend, prompt, GREEDY, f"r{i}") for i, prompt in enumerate(prompts)))
    assert [tokens for (tokens,) in answers] == generated_by_transformers(folder, prompts, NUM_OUTPUT)
    assert counters(fleet, "d").num_loaded == NUM_PROMPTS
    assert counters(fleet, "d").num_recomputed == 0
    assert sorted(backend.prefills_released) == sorted(f"r{i}" for i in range(NUM_PROMPTS))
    await fleet.wait_idle()


@pytest.mark.parametrize("fleet", [0.3], indirect=True, ids=[""])
async def test_every_loss_at_every_message_leaves_the_tokens_and_no_block(fleet: Fleet) -> None:
    prompt = shared_prompts(1)[0]
    alone = EngineBackend(fleet.replicas)
    alone.is_paired = False
    params = replace(SAMPLED, n=3)
    expected = await fleet.answer(alone, prompt, params, "alone")
    assert len({tuple(tokens) for tokens in expected}) > 1, "choices differ"
    for number, (replica_id, num_messages, loss) in enumerate(
        (replica_id, num_messages, loss)
        for replica_id, last in (("p", 2), ("d", 5))
        for num_messages in range(last)
        for loss in (ReplicaDied, ReplicaHung, ReplicaLeft)
    ):
        backend = EngineBackend(fleet.replicas)
        backend.losses = {replica_id: (num_messages, loss)}
        case = (replica_id, num_messages, loss.__name__)
        async with asyncio.timeout(30):
            assert await fleet.answer(backend, prompt, params, f"loss-{number}") == expected, case
        assert backend.gone == ([replica_id] if loss is ReplicaDied else []), case
        assert fleet.record.num_failovers == (replica_id == "d"), case
        await fleet.wait_idle()


@pytest.mark.parametrize("fleet", [0.3], indirect=True, ids=[""])
async def test_client_that_leaves_at_any_message_leaves_no_block(fleet: Fleet) -> None:
    prompt = shared_prompts(1)[0]
    for num_messages in range(1, 12):
        backend = EngineBackend(fleet.replicas)
        backend.leave_after = num_messages
        reader = asyncio.create_task(fleet.answer(backend, prompt, replace(SAMPLED, n=2), f"left-{num_messages}"))
        waiting = asyncio.create_task(backend.has_left.wait())
        await asyncio.wait([reader, waiting], return_when=asyncio.FIRST_COMPLETED)
        reader.cancel()
        waiting.cancel()
        await asyncio.gather(reader, waiting, return_exceptions=True)
        await fleet.wait_idle()
        assert backend.released == [f"left-{num_messages}"]


@pytest.mark.parametrize("fleet", [0.5], indirect=True, ids=[""])
async def test_losses_at_random_under_the_real_router_leave_no_booking_and_no_block(fleet: Fleet) -> None:
    chance = random.Random(11)
    prompts = shared_prompts(24)
    alone = EngineBackend(fleet.replicas)
    alone.is_paired = False
    expected = [await fleet.answer(alone, prompt, SAMPLED, f"alone-{i}") for i, prompt in enumerate(prompts)]
    async with fleet.routed() as backend, asyncio.timeout(60):
        for i in range(len(prompts)):
            role, last = chance.choice([("prefill", 1), ("decode", 4)])
            backend.losses[f"r{i}", role] = (chance.randint(0, last), chance.choice([ReplicaDied, ReplicaHung, ReplicaLeft]))
        answers = await asyncio.gather(*(fleet.answer(backend, prompt, SAMPLED, f"r{i}") for i, prompt in enumerate(prompts)))
        assert answers == expected
        assert len(backend.losses) < 4, "nearly all of them were to happen"
        while (described := backend.router.describe()[MODEL])["num_bookings"] or described["num_prefill_bookings"]:
            await asyncio.sleep(0.002)  # the last notices are on their way
        assert len(backend.prefills_released) == len(set(backend.prefills_released)) >= len(prompts)
        await fleet.wait_idle()
