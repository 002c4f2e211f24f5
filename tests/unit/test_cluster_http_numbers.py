"""Numbers at the edges of float64 and float32, over HTTP and through a real engine: an answer, or a 400 that names the field."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.llm import LLM
from replicas.request import GenerationRequest
from replicas.sampling.sampler import Sampler
from replicas.sampling.sampling_state import SamplingState
from replicas.sampling_params import SamplingParams
from replicas.text.tokenizer import Tokenizer
from tests.unit.in_process_cluster import MODEL, TEXT, client_of, running_cluster
from tests.unit.openai_schemas import check_error

FIELDS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
NUMBERS = (
    "0", "-0", "-0.0", "0e999", "5e-324", "1e-320", "1e-310", "1e-45", "1e-40", "1e-38", "1.2e-38", "1e-30", "0.1", "1", "1.0", "2", "100",
    "1e38", "3.5e38", "1e308", "1e309", "1e999", "-1e-320", "-1e-38", "-1e308", "-1e999", f"1{'0' * 400}", f"-1{'0' * 400}",
    "NaN", "Infinity", "-Infinity",
)  # fmt: skip


@pytest.fixture(scope="module")
def settings(default_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Of a random model, whose logits are of both signs."""
    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=default_tokenizer.vocab_size, initializer_range=1.0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return EngineConfig(model=str(folder), dtype="float32", kv_cache_bytes=1 << 22, max_num_batched_tokens=256, num_threads=1)


@pytest.fixture
async def client(default_tokenizer: Tokenizer, settings: EngineConfig, same_torch_threads: None) -> AsyncIterator[httpx.AsyncClient]:
    async with running_cluster(default_tokenizer, make_engine=lambda: load_engine(settings)) as cluster, client_of(cluster) as made:  # type: ignore[arg-type, return-value]
        yield made


def body_with(field: str, number: str, **others: Any) -> bytes:
    """By hand: `json.dumps` writes none of these numbers as they are."""
    rest = json.dumps({"model": MODEL, "prompt": "one two one two", "max_tokens": 3, "logprobs": 2, "seed": 1, **others})
    return f'{rest[:-1]}, "{field}": {number}}}'.encode()


def check_answer(response: httpx.Response, field: str) -> None:
    if response.status_code != 200:
        check_error(response, 400, field if response.json()["error"]["code"] != "invalid_json" else None)
        return
    (choice,) = response.json()["choices"]
    assert len(choice["logprobs"]["tokens"]) >= 1
    assert all(math.isfinite(value) for value in choice["logprobs"]["token_logprobs"])


@pytest.mark.parametrize("field", FIELDS)
async def test_number_is_served_or_refused_by_name(client: httpx.AsyncClient, field: str) -> None:
    statuses = set()
    for number in NUMBERS:
        for others in ({}, {"repetition_penalty": 1.5}, {"temperature": 0}, {"top_k": 5, "frequency_penalty": 1}):
            if field not in others:
                response = await client.post(TEXT, content=body_with(field, number, **others))
                check_answer(response, field)
                statuses.add(response.status_code)
    assert statuses == {200, 400}


async def test_bias_is_served_or_refused_by_name(client: httpx.AsyncClient) -> None:
    for number in NUMBERS:
        for others in ({}, {"repetition_penalty": 1e-38}):
            check_answer(await client.post(TEXT, content=body_with("logit_bias", f'{{"5": {number}}}', **others)), "logit_bias")


def test_engine_draws_with_any_number_that_its_parameters_take(
    default_tokenizer: Tokenizer, settings: EngineConfig, same_torch_threads: None
) -> None:
    asked = [
        SamplingParams(
            max_tokens=3, ignore_eos=True, temperature=temperature, repetition_penalty=penalty, logit_bias={7: bias, 8: -bias}, logprobs=1,
            top_p=tiny if temperature else 1.0, min_p=tiny, frequency_penalty=tiny, presence_penalty=-tiny, seed=0,
        )
        for penalty in (5e-324, 1e-320, 1e-45, 1e-38, 1e-30, 1e30, 1e38, 1e39, 1e308)
        for temperature in (0.0, 1e-320, 1e-38, 1.0, 1e38, 1e308)
        for bias, tiny in ((1e308, 1e-320), (5e-324, 5e-324), (1e38, 1e-38))
    ]  # fmt: skip
    with LLM.from_engine(load_engine(settings), default_tokenizer) as llm:
        outputs = llm.generate([[5, 6, 7, 5]] * len(asked), asked, use_tqdm=False)
    for params, output in zip(asked, outputs, strict=True):
        (choice,) = output.outputs
        assert (choice.error, len(choice.token_ids)) == (None, 3), params
        assert all(math.isfinite(each.logprob) for each in choice.logprobs or ()), params


@pytest.mark.parametrize(
    ("penalty", "logits", "token_id"),
    [
        (5e-324, [1.0, 2.0, -1.0, 0.5], 0),  # 1 divided by next to nothing
        (1e-38, [1.0, 2.0, -1.0, 0.5], 0),
        (1e-38, [-1.0, -2.0, -3.0, -4.0], 0),  # next to 0, and the others below
        (1e-38, [0.0, 2.0, 1.0, 1.0], 1),  # 0 whatever divides it
        (1e308, [4.0, 2.0, -1.0, 0.5], 1),  # next to 0
        (1e308, [-1.0, -2.0, -3.0, -4.0], 1),  # far below the others
    ],
)
def test_repetition_penalty_beyond_float32_decides_as_its_limit(penalty: float, logits: list[float], token_id: int) -> None:
    request = GenerationRequest(request_id="r", prompt_ids=(0,), params=SamplingParams(repetition_penalty=penalty, temperature=0), seed=0)
    sampled = Sampler(len(logits)).sample(torch.tensor([logits]), [SamplingState(request, [0])])
    assert (sampled.token_ids, sampled.errors) == ([token_id], {})


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_parameters_refuse_numbers_that_are_none(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be "):
        SamplingParams(**{field: value})
