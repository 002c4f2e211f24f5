"""The golden rule: greedy tokens equal transformers' generate on the default model, however the work is cut up."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvcache.block_pool import BlockPool
from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.grammar_spec import GrammarKind, GrammarSpec
from replicas.request import FinishReason
from replicas.sampling_params import SamplingParams
from replicas.scheduling.scheduler import Scheduler
from replicas.scheduling.scheduler_config import SchedulerConfig
from replicas.text.tokenizer import Tokenizer
from tests import engine_harness
from tests.engine_harness import requests_for, run
from tests.prompts import mixed_prompts

IS_EXHAUSTIVE = bool(os.environ.get("MANTA_TEST_EXHAUSTIVE"))
NUM_OUTPUT = 64 if IS_EXHAUSTIVE else 40
"""Two or three blocks an answer; an engine that goes wrong at a token goes on differently from there."""
ALONE = range(20) if IS_EXHAUSTIVE else range(0, 20, 9)
"""Prompts that also run alone under every combination; all of them take several minutes on two cores."""
PREEMPTED = [(2048, True), (2048, False), (37, True), (37, False)] if IS_EXHAUSTIVE else [(2048, False), (37, True)]
"""Budget, and whether prefixes are cached."""

GREEDY = replace(engine_harness.GREEDY, max_tokens=NUM_OUTPUT)

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module", autouse=True)
def all_cores() -> Iterator[None]:
    """Engines set torch's threads for the whole process; earlier tests may have left one."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prompts(default_tokenizer: Tokenizer) -> list[list[int]]:
    return mixed_prompts(default_tokenizer)


@pytest.fixture(scope="module")
def model(default_model_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of `generate`, each prompt padded on the left and masked; one by one it would take minutes."""
    eos, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    outputs = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_OUTPUT, do_sample=False, pad_token_id=0)
    model.generation_config.eos_token_id = eos
    return outputs[:, longest:].tolist()


def _load(folder: Path, **settings: Any) -> Engine:
    return load_engine(EngineConfig(model=str(folder), max_model_len=1024, kv_cache_bytes=1 << 30, max_num_batched_tokens=256, **settings))


@pytest.fixture(scope="module")
def engine(default_model_dir: Path) -> Engine:
    return _load(default_model_dir, dtype="float32", runner="native")


def _rescheduled(engine: Engine, *, budget: int, caching: bool, num_blocks: int | None = None) -> Engine:
    """The same model and KV tensors under another scheduler, its cache empty."""
    old = engine.scheduler
    num_blocks = num_blocks or old.pool.num_blocks
    config = SchedulerConfig(
        max_num_seqs=20,
        max_num_batched_tokens=budget,
        max_model_len=min(old.config.max_model_len, num_blocks * old.pool.block_size),
        eos_token_ids=old.config.eos_token_ids,
        enable_prefix_caching=caching,
    )
    engine.scheduler = Scheduler(config, BlockPool(num_blocks, old.pool.block_size))
    return engine


@pytest.mark.parametrize("budget", [2048, 37], ids=["whole", "chunked"])
def test_all_at_once_cold_then_hot_equal_generate(engine: Engine, prompts: list[list[int]], expected: list[list[int]], budget: int) -> None:
    engine = _rescheduled(engine, budget=budget, caching=True)
    for state in ("cold", "hot"):
        results = run(engine, requests_for(prompts, GREEDY, prefix=state))
        assert [r.token_ids for r in results] == expected
        if state == "hot":
            assert all(r.num_cached_tokens >= len(p) - 16 for r, p in zip(results, prompts, strict=True))


@pytest.mark.parametrize("budget", [2048, 37], ids=["whole", "chunked"])
def test_alone_cold_then_hot_equals_generate(engine: Engine, prompts: list[list[int]], expected: list[list[int]], budget: int) -> None:
    for index in ALONE:
        engine = _rescheduled(engine, budget=budget, caching=True)
        for state in ("cold", "hot"):
            (result,) = run(engine, requests_for([prompts[index]], GREEDY, prefix=state))
            assert result.token_ids == expected[index], f"prompt {index}, {state}"


TIGHT_BLOCKS = 40
"""Holds a few of the shortest prompts, and not what they all generate: 3 to 5 preemptions, counted with the scheduler alone."""


def _shortest(prompts: list[list[int]]) -> list[int]:
    return sorted(range(len(prompts)), key=lambda index: len(prompts[index]))[:12]


@pytest.mark.parametrize(("budget", "caching"), PREEMPTED)
def test_forced_preemption_equals_generate(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]], budget: int, caching: bool
) -> None:
    chosen = _shortest(prompts)
    engine = _rescheduled(engine, budget=budget, caching=caching, num_blocks=TIGHT_BLOCKS)
    before = engine.stats().num_preemptions
    results = run(engine, requests_for([prompts[index] for index in chosen], GREEDY))
    assert engine.stats().num_preemptions - before >= 3, "the pool was meant to be too small"
    assert [r.token_ids for r in results] == [expected[index] for index in chosen]


def test_seed_alone_and_batched_gives_the_same_tokens(engine: Engine, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, max_tokens=24, ignore_eos=True)
    seeds = [1000 + i for i in range(len(prompts[::2]))]
    batched = run(_rescheduled(engine, budget=37, caching=True), requests_for(prompts[::2], params, seeds=seeds))
    for index in (0, 4, 8):
        (alone,) = run(
            _rescheduled(engine, budget=2048, caching=False),
            requests_for([prompts[2 * index]], params, seeds=[seeds[index]], prefix="alone"),
        )
        assert alone.token_ids == batched[index].token_ids
    other = run(_rescheduled(engine, budget=2048, caching=True), requests_for(prompts[:1], params, seeds=[5]))
    assert other[0].token_ids != batched[0].token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_constrained_and_free_rows_beside_each_other_are_as_alone(
    engine: Engine, default_model_dir: Path, prompts: list[list[int]], default_tokenizer: Tokenizer, dtype: str
) -> None:
    """The native runner keeps every bit in bfloat16 too. Constrained answers are valid."""
    if dtype == "bfloat16":
        engine = _load(default_model_dir, dtype="bfloat16", runner="native")
    properties = {"short_name": {"type": "string", "maxLength": 20}, "number_of_people": {"type": "integer", "minimum": 1, "maximum": 99}}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    free = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=48, ignore_eos=True)
    constrained = replace(free, ignore_eos=False, grammar=GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema)))
    chosen = [prompts[index] for index in _shortest(prompts)[:6]]
    requests = [
        replace(request, params=constrained if index % 2 else free)
        for index, request in enumerate(requests_for(chosen, free, prefix=dtype))
    ]
    together = [(result.token_ids, result.finish_reason) for result in run(engine, requests)]
    for request, found in zip(requests, together, strict=True):
        (alone,) = run(engine, [replace(request, request_id=f"{request.request_id}-alone")])
        assert (alone.token_ids, alone.finish_reason) == found
    for token_ids, reason in together[1::2]:
        assert reason is FinishReason.STOP
        jsonschema.validate(json.loads(default_tokenizer.decode(token_ids, skip_special_tokens=True)), schema)
    engine.scheduler.check()


def test_choices_share_the_prompt_and_differ_by_choice(engine: Engine, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, n=3)
    engine = _rescheduled(engine, budget=2048, caching=True)
    (base,) = requests_for([prompts[3]], params)
    results = run(engine, [replace(base, choice=choice) for choice in range(3)])
    assert len({tuple(r.token_ids) for r in results}) == 3
    assert [r.num_cached_tokens for r in results] == [0] + [(len(prompts[3]) - 1) // 16 * 16] * 2


def test_resend_with_output_ids_continues_exactly(engine: Engine, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.8, frequency_penalty=0.5, repetition_penalty=1.1, max_tokens=20, ignore_eos=True)
    engine = _rescheduled(engine, budget=2048, caching=True)
    (whole,) = run(engine, requests_for([prompts[1]], params, prefix="whole"))
    (base,) = requests_for([prompts[1]], params, prefix="resent")
    (rest,) = run(_rescheduled(engine, budget=64, caching=False), [replace(base, output_ids=tuple(whole.token_ids[:9]), attempt=1)])
    assert whole.token_ids[:9] + rest.token_ids == whole.token_ids


def test_logprobs_equal_transformers_log_softmax(engine: Engine, model: PreTrainedModel, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.7, max_tokens=10, logprobs=5, ignore_eos=True)
    (result,) = run(_rescheduled(engine, budget=37, caching=True), requests_for([prompts[2]], params))
    with torch.inference_mode():
        logits_TV = model(torch.tensor([prompts[2] + result.token_ids])).logits[0]
    expected_TV = logits_TV.log_softmax(-1)[len(prompts[2]) - 1 :]
    for position, found in enumerate(result.logprobs):
        top = expected_TV[position].topk(5)
        assert found.token_id == result.token_ids[position]
        assert found.logprob == pytest.approx(float(expected_TV[position, found.token_id]), abs=1e-3)
        assert [value for _, value in found.top] == pytest.approx(top.values.tolist(), abs=1e-3)


def test_transformers_runner_batched_chunked_and_preempted_equals_generate(
    default_model_dir: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = _load(default_model_dir, dtype="float32", runner="transformers")
    chosen = _shortest(prompts)[:8]
    engine = _rescheduled(engine, budget=61, caching=True, num_blocks=24)
    results = run(engine, requests_for([prompts[index] for index in chosen], replace(GREEDY, max_tokens=32)))
    assert engine.stats().num_preemptions >= 2, "the pool was meant to be too small"
    assert [r.token_ids for r in results] == [expected[index][:32] for index in chosen]


def test_native_bfloat16_is_the_same_alone_or_batched_whole_or_chunked_hot_or_preempted(
    default_model_dir: Path, prompts: list[list[int]]
) -> None:
    engine = _load(default_model_dir, dtype="bfloat16", runner="native")
    engine = _rescheduled(engine, budget=2048, caching=False)
    short = [prompts[index] for index in _shortest(prompts)[:8]]
    alone = [run(engine, requests_for([prompt], GREEDY))[0].token_ids for prompt in short[::3]]
    engine = _rescheduled(engine, budget=37, caching=True, num_blocks=24)
    for state in ("cold", "hot"):
        results = run(engine, requests_for(short, GREEDY, prefix=state))
        assert [r.token_ids for r in results[::3]] == alone
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("runner", ["native", "transformers"])
def test_bfloat16_tokens_are_within_half_a_nat_of_the_best(
    default_model_dir: Path, model: PreTrainedModel, prompts: list[list[int]], runner: str
) -> None:
    engine = _load(default_model_dir, dtype="bfloat16", runner=runner)
    params = replace(GREEDY, max_tokens=24)
    chosen = prompts[::5] if runner == "native" else [prompts[index] for index in _shortest(prompts)[:1]]  # torch emulates bfloat16
    for prompt, result in zip(chosen, run(engine, requests_for(chosen, params)), strict=True):
        with torch.inference_mode():
            logprobs_TV = model(torch.tensor([prompt + result.token_ids])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        gaps = logprobs_TV.amax(-1) - logprobs_TV.gather(-1, torch.tensor(result.token_ids)[:, None])[:, 0]
        assert float(gaps.max()) <= 0.5
