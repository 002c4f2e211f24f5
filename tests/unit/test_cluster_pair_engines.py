"""Choices over real engines that hand over in one process, in float32: a pair says what one engine says, whatever is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.access_log import AccessRecord
from cluster.backend import ReplicaDied, ReplicaGone, ReplicaHung, ReplicaLeft
from cluster.choice_streams import ChoiceStreams
from cluster.prepared_generation import PreparedGeneration
from cluster.replica_losses import FailoverPolicy
from cluster.served_model import ServedModel
from replicas.async_engine import AsyncEngine
from replicas.engine import Engine
from replicas.engine_config import EngineConfig, Role
from replicas.engine_loader import load_engine
from replicas.handoff_wiring import InProcessWiring
from replicas.request import GenerationRequest, RequestProgress
from replicas.sampling_params import SamplingParams
from replicas.text.tokenizer import Tokenizer
from router.snapshot import Decision, RoutingRequest
from tests.tiny_llama import generated_by_transformers, save_tiny_llama, shared_prompts
from tests.unit.fake_backend import FakeBackend

NUM_PROMPTS, NUM_OUTPUT = 16, 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, frequency_penalty=0.4, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=1)
ROLES: dict[str, Role] = {"p": "prefill", "d": "decode", "d2": "decode"}


class _EngineBackend(FakeBackend):
    """Pairs of the prefill replica `p` and a decode replica that is not excluded. A replica in `losses` is lost to the next
    request that comes there, after so many messages."""

    def __init__(self, replicas: dict[str, AsyncEngine]) -> None:
        super().__init__()
        self._replicas = replicas
        self.is_paired = True
        self.losses: dict[str, tuple[int, type[ReplicaGone]]] = {}
        self.num_messages = 0
        self.leave_after: int | None = None
        """The client leaves when so many messages have come from all replicas."""
        self.has_left = asyncio.Event()

    def decide(self, request: RoutingRequest) -> Decision:
        decode_id = "d2" if "d" in request.excluded_replicas else "d"
        prefill_id = "p" if self.is_paired and not request.is_whole else None
        return Decision(request_id=request.request_id, replica_id=decode_id, replica_role="decode", prefill_replica_id=prefill_id)

    async def generate(
        self, model: str, replica_id: str, request: GenerationRequest, role: Role = "unified"
    ) -> AsyncGenerator[RequestProgress, None]:
        num_left, loss = self.losses.pop(replica_id, (-1, ReplicaDied))
        async with aclosing(self._replicas[replica_id].generate(request)) as stream:
            async for whole in stream:
                for progress in _parts(whole):
                    if num_left == 0:
                        raise loss(replica_id, "as told")
                    num_left -= 1
                    self.num_messages += 1
                    if self.num_messages == self.leave_after:
                        self.has_left.set()
                    yield progress


def _parts(progress: RequestProgress) -> list[RequestProgress]:
    """A message for the offer of a prefill, and one for each token: how many came together is chance."""
    parts = [] if progress.handoff is None else [replace(progress, token_ids=(), logprobs=(), finish_reason=None)]
    num_bare = len(progress.token_ids) - len(progress.logprobs)
    for index, token_id in enumerate(progress.token_ids):
        logprobs = progress.logprobs[index - num_bare :][:1] if index >= num_bare else ()
        end = progress.finish_reason if index == len(progress.token_ids) - 1 else None
        parts.append(replace(progress, token_ids=(token_id,), logprobs=logprobs, handoff=None, finish_reason=end))
    return parts or [progress]


class _Fleet:
    """Engines of every role with a gateway's choices over them."""

    def __init__(self, tokenizer: Tokenizer, kv_lease_s: float) -> None:
        """An offer that nobody takes keeps its blocks for `kv_lease_s`."""
        self.engines: dict[str, Engine] = {}
        self.replicas: dict[str, AsyncEngine] = {}
        self._tokenizer, self._kv_lease_s = tokenizer, kv_lease_s
        self.record = AccessRecord(request_id="a", method="POST", path="/v1/completions", started_s=0.0)

    async def start(self, folder: Path, stack: AsyncExitStack) -> None:
        wiring = InProcessWiring()
        for replica_id, role in ROLES.items():
            replica = AsyncEngine(lambda replica_id=replica_id, role=role: self._load(replica_id, role, folder, wiring))
            await replica.start()
            stack.push_async_callback(replica.shutdown)
            self.replicas[replica_id] = replica

    def _load(self, replica_id: str, role: Role, folder: Path, wiring: InProcessWiring) -> Engine:
        config = EngineConfig(
            model=str(folder), dtype="float32", runner="native", max_model_len=128, num_threads=1, max_num_batched_tokens=64,
            kv_cache_bytes=1 << 23, max_num_seqs=64, block_size=8, role=role, kv_lease_s=self._kv_lease_s,
        )  # fmt: skip
        self.engines[replica_id] = engine = load_engine(config, wiring)
        return engine

    async def answer(self, backend: FakeBackend, prompt: list[int], params: SamplingParams, name: str) -> list[list[int]]:
        """The tokens of each choice."""
        request = GenerationRequest(request_id=name, prompt_ids=tuple(prompt), params=params, seed=7)
        prepared = PreparedGeneration(response_id=name, model="m", requests=(request,), params=params)
        model = ServedModel("m", self.engines["d"].description, self._tokenizer, created_s=0)
        self.record = AccessRecord(request_id=name, method="POST", path="/v1/completions", started_s=0.0)
        tokens: list[list[int]] = [[] for _ in range(params.n)]
        async with ChoiceStreams(prepared, model, backend, self.record, FailoverPolicy()) as streams:
            async for delta in streams:
                tokens[delta.index] += delta.token_ids
                assert params.logprobs is None or [one.token_id for one in delta.logprobs] == list(delta.token_ids)
        return tokens

    async def wait_idle(self) -> None:
        """Every block is back."""
        async with asyncio.timeout(5):
            while any(
                engine.has_work or engine.scheduler.pool.num_free < engine.scheduler.pool.num_blocks for engine in self.engines.values()
            ):
                await asyncio.sleep(0.002)  # the engines' threads have no event to tell of it
        for engine in self.engines.values():
            engine.check()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
async def fleet(request: pytest.FixtureRequest, folder: Path, default_tokenizer: Tokenizer) -> AsyncIterator[_Fleet]:
    async with AsyncExitStack() as stack:
        made = _Fleet(default_tokenizer, request.param)
        await made.start(folder, stack)
        yield made


def counters(fleet: _Fleet, replica_id: str) -> Any:
    handoffs = fleet.engines[replica_id].handoffs
    assert handoffs is not None
    return handoffs.counters


@pytest.mark.parametrize("fleet", [30.0], indirect=True, ids=[""])
async def test_prompts_at_once_equal_transformers(fleet: _Fleet, folder: Path) -> None:
    prompts = shared_prompts(NUM_PROMPTS)
    backend = _EngineBackend(fleet.replicas)
    answers = await asyncio.gather(*(fleet.answer(backend, prompt, GREEDY, f"r{i}") for i, prompt in enumerate(prompts)))
    assert [tokens for (tokens,) in answers] == generated_by_transformers(folder, prompts, NUM_OUTPUT)
    assert counters(fleet, "d").num_loaded == NUM_PROMPTS
    assert counters(fleet, "d").num_recomputed == 0
    assert sorted(backend.prefills_released) == sorted(f"r{i}" for i in range(NUM_PROMPTS))
    await fleet.wait_idle()


@pytest.mark.parametrize("fleet", [0.3], indirect=True, ids=[""])
async def test_every_loss_at_every_message_leaves_the_tokens_and_no_block(fleet: _Fleet) -> None:
    prompt = shared_prompts(1)[0]
    alone = _EngineBackend(fleet.replicas)
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
        backend = _EngineBackend(fleet.replicas)
        backend.losses = {replica_id: (num_messages, loss)}
        case = (replica_id, num_messages, loss.__name__)
        async with asyncio.timeout(20):
            assert await fleet.answer(backend, prompt, params, f"loss-{number}") == expected, case
        assert backend.gone == ([replica_id] if loss is ReplicaDied else []), case
        assert fleet.record.num_failovers == (replica_id == "d"), case
        await fleet.wait_idle()


@pytest.mark.parametrize("fleet", [0.3], indirect=True, ids=[""])
async def test_client_that_leaves_at_any_message_leaves_no_block(fleet: _Fleet) -> None:
    prompt = shared_prompts(1)[0]
    for num_messages in range(1, 12):
        backend = _EngineBackend(fleet.replicas)
        backend.leave_after = num_messages
        reader = asyncio.create_task(fleet.answer(backend, prompt, replace(SAMPLED, n=2), f"left-{num_messages}"))
        waiting = asyncio.create_task(backend.has_left.wait())
        await asyncio.wait([reader, waiting], return_when=asyncio.FIRST_COMPLETED)
        reader.cancel()
        waiting.cancel()
        await asyncio.gather(reader, waiting, return_exceptions=True)
        await fleet.wait_idle()
        assert backend.released == [f"left-{num_messages}"]
