"""Schemas on a small model with a real vocabulary: every way to run it gives the same answers, and each is what the schema asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from replicas.engine.disaggregated import DisaggregatedEngine
from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig, ParallelConfig
from replicas.grammar_spec import GrammarKind, GrammarSpec
from replicas.llm import LLM
from replicas.request import FinishReason, GenerationRequest
from replicas.sampling_params import SamplingParams
from replicas.speculation_config import SpeculationConfig
from replicas.text.tokenizer import Tokenizer
from tests.engine_harness import Generated, run
from tests.rank_threads import ThreadLauncher
from tests.small_served_model import save_small_model

SCHEMA = {
    "type": "object",
    "properties": {
        "customer_reference_number": {"type": "integer", "minimum": 100, "maximum": 999},
        "preferred_contact_method": {"enum": ["electronic mail", "telephone", "carrier pigeon"]},
        "delivery_instructions": {"type": "string", "maxLength": 8},
        "is_returning_customer": {"type": "boolean"},
    },
    "required": ["customer_reference_number", "preferred_contact_method", "delivery_instructions", "is_returning_customer"],
    "additionalProperties": False,
}
GRAMMAR = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(SCHEMA))
PARAMS = SamplingParams(max_tokens=120, temperature=1.0, grammar=GRAMMAR)
PROMPTS = ([5, 6, 7, 8, 9], list(range(100, 137)), [11, 12])

pytestmark = pytest.mark.usefixtures("same_torch_threads")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> Path:
    return save_small_model(tmp_path_factory.mktemp("small"), default_model_dir)


def config(folder: Path, **settings: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "dtype": "float32", "runner": "native", "kv_cache_bytes": 1 << 22, "max_num_seqs": 8, "max_num_batched_tokens": 48,
        "max_model_len": 512, "num_threads": 1,
    }  # fmt: skip
    return EngineConfig(model=str(folder), **{**defaults, **settings})


@pytest.fixture(scope="module")
def engine(folder: Path) -> Any:
    made = load_engine(config(folder))
    yield made
    made.close()


def requests(params: SamplingParams = PARAMS, *, numbers: Sequence[int] = range(3), name: str = "r") -> list[GenerationRequest]:
    return [
        GenerationRequest(request_id=f"{name}{number}", prompt_ids=tuple(PROMPTS[number]), params=params, seed=40 + number)
        for number in numbers
    ]


def answers(engine: Engine, asked: Sequence[GenerationRequest], *, check: bool = True) -> list[tuple[list[int], FinishReason | None]]:
    return [(result.token_ids, result.finish_reason) for result in run(engine, asked, check=check)]


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[tuple[list[int], FinishReason | None]]:
    return answers(engine, requests(name="expected"))


def test_answers_are_what_the_schema_asks_for(engine: Engine, expected: Any, default_tokenizer: Tokenizer) -> None:
    for token_ids, reason in expected:
        assert reason is FinishReason.STOP
        jsonschema.validate(json.loads(default_tokenizer.decode(token_ids)), SCHEMA)
    assert len({tuple(token_ids) for token_ids, _ in expected}) == 3
    assert engine.stats().grammars.num_forced_tokens > 20


def test_rows_beside_constrained_ones_are_as_alone_and_so_are_these(engine: Engine, expected: Any) -> None:
    free = requests(replace(PARAMS, grammar=None, max_tokens=40), name="free")
    alone = [answers(engine, [one])[0] for one in free]
    mixed = [*requests(name="mixed"), *requests(replace(PARAMS, grammar=None, max_tokens=40), name="beside")]
    found = answers(engine, mixed)
    assert found == [*expected, *alone]


def test_tokens_drawn_one_by_one_with_logprobs_equal_the_forced_ones(engine: Engine, expected: Any) -> None:
    results = run(engine, requests(replace(PARAMS, logprobs=1), name="logprobs"))
    assert [(result.token_ids, result.finish_reason) for result in results] == expected
    assert all(len(result.logprobs) == len(result.token_ids) for result in results)


def test_answer_continued_from_any_token_is_the_same(engine: Engine, expected: Any) -> None:
    token_ids, reason = expected[0]
    cuts = range(0, len(token_ids), 7)
    (whole,) = requests(numbers=[0])
    asked = [replace(whole, request_id=f"cut{cut}", output_ids=tuple(token_ids[:cut]), attempt=1) for cut in cuts]
    for cut, (rest, rest_reason) in zip(cuts, answers(engine, asked), strict=True):
        assert (token_ids[:cut] + rest, rest_reason) == (token_ids, reason)


def test_answer_that_is_cut_ends_with_length(engine: Engine, expected: Any) -> None:
    (short,) = requests(replace(PARAMS, max_tokens=9), numbers=[1], name="short")
    ((token_ids, reason),) = answers(engine, [short])
    assert (len(token_ids), reason) == (9, FinishReason.LENGTH)


@pytest.mark.parametrize("how", ["transformers", "ranks", "bfloat16", "drafts"])
def test_other_ways_to_run_give_valid_answers_and_in_float32_the_same(
    folder: Path, expected: Any, how: str, default_tokenizer: Tokenizer
) -> None:
    loads: dict[str, Callable[[], Engine]] = {
        "transformers": lambda: load_engine(config(folder, runner="transformers")),
        "ranks": lambda: load_engine(
            config(folder, tensor_parallel_size=2, parallel=ParallelConfig(rank_deadline_s=60.0)), launcher=ThreadLauncher()
        ),
        "bfloat16": lambda: load_engine(config(folder, dtype="bfloat16")),
        "drafts": lambda: load_engine(config(folder, speculation=SpeculationConfig(method="suffix"))),
    }
    engine = loads[how]()
    try:
        found = answers(engine, requests())
        again = answers(engine, requests(name="again"))  # with drafts from the answers before
    finally:
        engine.close()
    assert again == found
    for token_ids, _ in found:
        jsonschema.validate(json.loads(default_tokenizer.decode(token_ids)), SCHEMA)
    if how != "bfloat16":
        assert found == expected


@pytest.mark.parametrize("logprobs", [None, 0])
def test_pair_of_engines_continues_the_grammar_behind_the_first_token(folder: Path, expected: Any, logprobs: int | None) -> None:
    pair = DisaggregatedEngine.load(config(folder))
    results = {request.key: Generated() for request in requests()}
    try:
        for request in requests(replace(PARAMS, logprobs=logprobs)):
            pair.add_request(request)
        while pair.has_work:
            for item in pair.step().progress:
                results[item.key].token_ids += item.token_ids
                results[item.key].finish_reason = item.finish_reason
    finally:
        pair.close()
    assert [(result.token_ids, result.finish_reason) for result in results.values()] == expected


def test_offline_chat_takes_a_response_format(folder: Path, default_tokenizer: Tokenizer) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA}}
    messages = [{"role": "user", "content": "An order, please."}]
    with LLM.from_engine(load_engine(config(folder)), default_tokenizer) as llm:
        (answer,) = llm.chat(messages, SamplingParams(max_tokens=120, seed=3), use_tqdm=False, response_format=response_format)
        jsonschema.validate(json.loads(answer.outputs[0].text), SCHEMA)
        (word,) = llm.generate([[5, 6]], SamplingParams(grammar=GrammarSpec(kind=GrammarKind.CHOICE, text='["yes", "no"]')), use_tqdm=False)
        assert word.outputs[0].text in ("yes", "no")
        with pytest.raises(ValueError, match="exclude each other"):
            llm.chat(messages, SamplingParams(grammar=GRAMMAR), response_format=response_format)
        with pytest.raises(ValueError, match=r"response_format\.type must be one of"):
            llm.chat(messages, response_format={"type": "xml"})
