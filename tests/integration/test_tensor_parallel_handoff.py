"""Handoffs between engines whose ranks are real processes: the answers of one engine, and what happens when a rank is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvcache.handoff import KVHandoff
from replicas.engine.disaggregated import DisaggregatedEngine
from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig, ParallelConfig
from replicas.handoff.handoffs import Handoffs
from replicas.llm import LLM
from replicas.ranks.ranks import RankLost
from replicas.request import FinishReason, GenerationRequest
from replicas.sampling_params import SamplingParams
from replicas.text.tokenizer import Tokenizer
from tests.engine_harness import requests_for
from tests.prompts import mixed_prompts
from tests.rank_processes import rank_pids
from tests.tiny_llama import generated_by_transformers, save_tiny_llama, shared_prompts

NUM_OUTPUT = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
LEASE_S = 1.0
PATIENCE_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("same_torch_threads")]


DEFAULT_MODEL: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 32, "max_num_batched_tokens": 128, "kv_cache_bytes": 256 << 20, "max_model_len": 1024,
    "num_threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts(default_tokenizer: Tokenizer) -> list[list[int]]:
    return mixed_prompts(default_tokenizer)[::4]


@pytest.fixture(scope="module")
def unified(default_model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    with LLM(str(default_model_dir), **DEFAULT_MODEL) as llm:
        return _token_ids(llm, prompts)


def _token_ids(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("sizes", [(2, 1), (3, 2)], ids=lambda sizes: f"{sizes[0]}-to-{sizes[1]}")
def test_llm_of_two_pools_equals_unified_at_unequal_tensor_parallel_sizes(
    default_model_dir: Path, prompts: list[list[int]], unified: list[list[int]], sizes: tuple[int, int]
) -> None:
    """The default model has 3 KV heads: 2 and 1 at two ranks, one each at three."""
    settings = {**DEFAULT_MODEL, "mode": "disaggregated", "tensor_parallel_size": sizes[0]}
    with LLM(str(default_model_dir), **settings, decode_settings={"tensor_parallel_size": sizes[1]}) as llm:
        engine = llm._engine
        assert isinstance(engine, DisaggregatedEngine)
        for _ in ("cold", "hot"):
            assert _token_ids(llm, prompts) == unified
        counters = engine.decode.handoffs.counters  # type: ignore[union-attr]
        assert (counters.num_loaded, counters.num_recomputed) == (2 * len(prompts), 0)
        for one in (engine.prefill, engine.decode):
            one.check()
            assert one.scheduler.pool.num_free == one.scheduler.pool.num_blocks
            assert not one.has_work
    assert rank_pids() == []


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def long_prompt() -> list[int]:
    return next(prompt for prompt in shared_prompts(30) if len(prompt) > 80)


@pytest.fixture(scope="module")
def expected(tiny: Path, long_prompt: list[int]) -> list[int]:
    return generated_by_transformers(tiny, [long_prompt], NUM_OUTPUT)[0]


@contextmanager
def _engine(folder: Path, role: Any) -> Iterator[tuple[Engine, int]]:
    """One of two ranks that computes few tokens a step, and the process of its rank 1."""
    before = set(rank_pids())
    engine = load_engine(
        EngineConfig(
            model=str(folder), dtype="float32", role=role, tensor_parallel_size=2, max_model_len=128, max_num_seqs=4, block_size=8,
            max_num_batched_tokens=8, kv_cache_bytes=1 << 20, num_threads=1, kv_lease_s=LEASE_S,
            parallel=ParallelConfig(rank_deadline_s=3.0),
        )
    )  # fmt: skip
    (pid,) = set(rank_pids()) - before
    try:
        yield engine, pid
    finally:
        engine.close()
        assert not psutil.pid_exists(pid)


def _offer(engine: Engine, request: GenerationRequest) -> KVHandoff:
    engine.add_request(replace(request, wants_handoff=True))
    (handoff,) = [item.handoff for item in engine.step().progress if item.handoff is not None]
    return handoff


def _step_until(engine: Engine, is_over: Callable[[], bool]) -> tuple[list[int], FinishReason | None]:
    """Tokens that came until then, and how the request ended, if it did. Raises RankLost."""
    tokens: list[int] = []
    reason = None
    until_s = time.monotonic() + PATIENCE_S
    while not is_over():
        assert time.monotonic() < until_s, "the engine hangs"
        for item in engine.step().progress:
            tokens += item.token_ids
            reason = item.finish_reason or reason
        engine.check()
    return tokens, reason


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid)], timeout=PATIENCE_S)


def test_killed_rank_of_the_source_leaves_the_decode_engine_to_recompute(tiny: Path, long_prompt: list[int], expected: list[int]) -> None:
    with _engine(tiny, "prefill") as (prefill, pid), _engine(tiny, "decode") as (decode, _):
        assert isinstance(decode.handoffs, Handoffs)
        (request,) = requests_for([long_prompt], GREEDY)
        decode.add_request(replace(request, handoff=_offer(prefill, request)))
        _step_until(decode, lambda: decode.handoffs.ownership.has_transfers)
        prefill.step()
        _kill(pid)
        tokens, reason = _step_until(decode, lambda: not decode.has_work)
        assert (tokens, reason) == (expected, FinishReason.LENGTH)
        assert decode.handoffs.counters.num_recomputed == 1
        assert decode.scheduler.pool.num_free == decode.scheduler.pool.num_blocks
        with pytest.raises(RankLost):
            _step_until(prefill, lambda: False)


def test_killed_rank_of_the_receiver_costs_the_source_its_blocks_for_one_lease(
    tiny: Path, long_prompt: list[int], expected: list[int]
) -> None:
    with _engine(tiny, "prefill") as (prefill, _), _engine(tiny, "decode") as (decode, pid):
        assert isinstance(prefill.handoffs, Handoffs)
        assert isinstance(decode.handoffs, Handoffs)
        (request,) = requests_for([long_prompt], GREEDY)
        decode.add_request(replace(request, handoff=_offer(prefill, request)))
        _step_until(decode, lambda: decode.handoffs.ownership.has_transfers)
        _kill(pid)
        with pytest.raises(RankLost, match="rank 1 has died"):
            _step_until(decode, lambda: False)
        decode.close()
        tokens, reason = _step_until(prefill, lambda: not prefill.scheduler.has_work)
        assert (tokens, reason) == (expected[:1], FinishReason.HANDOFF)
        ended_s = time.monotonic()
        _step_until(prefill, lambda: not prefill.has_work)
        assert time.monotonic() - ended_s < LEASE_S + 0.5
        assert prefill.handoffs.ownership.counters.num_expired == 1
        assert prefill.scheduler.pool.num_free == prefill.scheduler.pool.num_blocks
        # It serves on, alone where need be.
        (again,) = requests_for([long_prompt], GREEDY, prefix="again")
        prefill.add_request(again)
        assert _step_until(prefill, lambda: not prefill.has_work) == (expected, FinishReason.LENGTH)
