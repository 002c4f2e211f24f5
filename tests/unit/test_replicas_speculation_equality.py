"""Answers with drafts equal those without, to the bit: whatever is drafted, on every runner, however the work is cut up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.block_pool import BlockPool
from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.request import FinishReason, GenerationRequest, RequestKey
from replicas.sampling_params import SamplingParams
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.scheduler import Scheduler
from replicas.speculation.ngram import NgramProposer
from replicas.speculation.proposer import Proposer
from replicas.speculation.suffix import SuffixProposer
from tests.checked_pair import CheckedPair
from tests.engine_harness import Generated, requests_for, run
from tests.rank_threads import ThreadLauncher
from tests.scripted_proposer import ScriptedProposer, eager_speculator
from tests.speculation_states import new_state
from tests.tiny_models import tiny_prompts

EOS = 2
NUM_OUTPUT = 24
SETUPS: dict[str, dict[str, Any]] = {
    "native-float32": {"dtype": "float32", "runner": "native"},
    "native-bfloat16": {"dtype": "bfloat16", "runner": "native"},
    "native-int4": {"dtype": "bfloat16", "runner": "native", "quantization": "int4", "quantized_cache_bytes": 0},
    "transformers-float32": {"dtype": "float32", "runner": "transformers", "attention_backend": "reference"},
}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.7, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.3},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "min_tokens and bias": {"temperature": 0.7, "min_tokens": 10, "logit_bias": {EOS: 6.0}, "ignore_eos": False},
    "stop tokens": {"temperature": 1.0, "stop_token_ids": tuple(range(5, 128, 9))},
}

ProposerOf = Callable[[dict[RequestKey, list[int]]], Proposer]
"""A proposer, made for the true answers."""

pytestmark = pytest.mark.usefixtures("same_torch_threads")


def suffix_over_answers(answers: dict[RequestKey, list[int]]) -> Proposer:
    proposer = SuffixProposer(4096)
    for answer in answers.values():
        proposer.forget(new_state([1], answer))
    return proposer


def random_tokens(answers: dict[RequestKey, list[int]]) -> Proposer:
    random = np.random.default_rng(1)
    return ScriptedProposer(lambda state, budget: random.integers(0, 128, budget).tolist())


def right_until_wrong(answers: dict[RequestKey, list[int]]) -> Proposer:
    """True tokens up to a random depth, and then what hurts most if it were taken: a neighbour, the end, the same token again."""
    random = np.random.default_rng(2)

    def draft(state: RequestState, budget: int) -> Sequence[int]:
        place = state.num_output_tokens
        depth = int(random.integers(0, budget + 1))
        right = answers[state.key][place : place + depth]
        last = (right or state.token_ids)[-1]
        wrong = [[(last + 1) % 128], [EOS], [last]][int(random.integers(0, 3))]
        return [*right, *wrong * (budget - len(right))]

    return ScriptedProposer(draft)


PROPOSERS: dict[str, ProposerOf] = {
    "ngram": lambda answers: NgramProposer(),
    "suffix": suffix_over_answers,
    "random": random_tokens,
    "right until wrong": right_until_wrong,
}


@pytest.fixture(scope="module", params=SETUPS, ids=str)
def loaded(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Iterator[Engine]:
    engine = load_engine(EngineConfig(model=str(folder_of("llama")), **SIZES, **SETUPS[request.param]))
    yield engine
    engine.close()


SIZES: dict[str, Any] = {
    "kv_cache_bytes": 1 << 20, "block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 96, "num_threads": 1,
}  # fmt: skip


def renewed(loaded: Engine, proposer: Proposer | None, *, num_blocks: int = 100, **settings: Any) -> Engine:
    """An engine over the same weights, with nothing cached and other drafts."""
    scheduler = Scheduler(replace(loaded.scheduler.config, **settings), BlockPool(num_blocks, 8))
    return Engine(
        scheduler=scheduler,
        runner=loaded._runner,
        sampler=loaded._chunk_sampler._sampler,
        description=loaded.description,
        speculator=None if proposer is None else eager_speculator(scheduler.drafts, proposer, max_tokens=5),
    )


def requests(params: SamplingParams) -> list[GenerationRequest]:
    """Prompts of 1 to 40 tokens, each with two seeds, so that the second finds the first one's blocks."""
    made = requests_for(tiny_prompts(), params)
    return [replace(one, request_id=f"{one.request_id}-{seed}", seed=seed) for one in made for seed in (1, 2)]


def said(results: Sequence[Generated]) -> list[tuple[object, ...]]:
    return [(one.token_ids, one.finish_reason, one.error, one.logprobs, one.prompt_logprobs) for one in results]


def assert_equal(engine: Engine, found: Sequence[Generated], expected: Sequence[Generated]) -> None:
    """To the bit. torch's products round by the number of rows, so there the log-probabilities may differ by rounding."""
    if engine.description.runner == "native":
        assert said(found) == said(expected)
        return
    assert [parts[:3] for parts in said(found)] == [parts[:3] for parts in said(expected)]
    for one, other in zip(found, expected, strict=True):
        for name in ("logprobs", "prompt_logprobs"):
            pairs = zip(getattr(one, name) or (), getattr(other, name) or (), strict=True)
            for token, right in pairs:
                assert token.token_id == right.token_id
                assert token.logprob == pytest.approx(right.logprob, abs=1e-4)
                assert [value for _, value in token.top] == pytest.approx([value for _, value in right.top], abs=1e-4)


def answers_of(asked: Sequence[GenerationRequest], results: Sequence[Generated]) -> dict[RequestKey, list[int]]:
    return {one.key: [*one.output_ids, *result.token_ids] for one, result in zip(asked, results, strict=True)}


def counts(engine: Engine) -> tuple[int, int]:
    """Accepted and refused drafts."""
    drafts = engine.stats().drafts
    return sum(one.num_accepted for one in drafts), sum(one.num_drafted - one.num_accepted for one in drafts)


def params_of(name: str) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NUM_OUTPUT, "ignore_eos": True, **PARAMS[name]})


@pytest.mark.parametrize("name", PARAMS)
def test_tokens_and_logprobs_are_equal_for_every_proposer(loaded: Engine, name: str) -> None:
    asked = requests(params_of(name))
    expected = run(renewed(loaded, None), asked)
    if name == "min_tokens and bias":
        assert {result.finish_reason for result in expected} >= {FinishReason.STOP}
    for kind, proposer_of in PROPOSERS.items():
        engine = renewed(loaded, proposer_of(answers_of(asked, expected)))
        assert_equal(loaded, run(engine, asked), expected)
        accepted, refused = counts(engine)
        assert refused > 0 or kind == "suffix", f"{kind} was never wrong"
        assert accepted > 0 or kind in ("random", "ngram"), f"{kind} was never right"


@pytest.mark.parametrize("name", ["greedy", "penalties"])
def test_preemption_between_drafts_changes_nothing(loaded: Engine, name: str) -> None:
    asked = requests(params_of(name))
    expected = run(renewed(loaded, None), asked)
    engine = renewed(loaded, right_until_wrong(answers_of(asked, expected)), num_blocks=16, max_model_len=96)
    assert_equal(loaded, run(engine, asked), expected)
    assert engine.stats().num_preemptions > 0
    assert counts(engine)[0] > 0


def test_cancelled_neighbours_change_nothing_and_leave_no_block(loaded: Engine) -> None:
    asked = requests(params_of("sampled"))
    expected = run(renewed(loaded, None), asked)
    engine = renewed(loaded, right_until_wrong(answers_of(asked, expected)))
    for one in asked:
        engine.add_request(one)
    tokens: dict[RequestKey, list[int]] = {one.key: [] for one in asked}
    number = 0
    while engine.has_work:
        number += 1
        if number % 4 == 0:
            engine.cancel(asked[number // 4 % len(asked)].key if number < 20 else asked[0].key)
        for item in engine.step().progress:
            tokens[item.key] += item.token_ids
        engine.check()
    answers = answers_of(asked, expected)
    assert all(answers[key][: len(found)] == found for key, found in tokens.items())
    assert sum(answers[key] == found for key, found in tokens.items()) >= 2, "none was left"
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


@pytest.mark.parametrize("num_known", [1, 9])
def test_request_that_is_sent_again_with_its_tokens_goes_on_as_before(loaded: Engine, num_known: int) -> None:
    asked = requests(params_of("penalties"))
    answers = answers_of(asked, run(renewed(loaded, None), asked))
    again = [replace(one, output_ids=tuple(answers[one.key][:num_known]), attempt=1) for one in asked]
    engine = renewed(loaded, right_until_wrong(answers))
    assert answers_of(again, run(engine, again)) == answers
    assert counts(engine)[0] > 0


def test_scored_prompts_and_drafts_share_a_step(loaded: Engine) -> None:
    params = replace(params_of("logprobs"), prompt_logprobs=2)
    asked = requests(params)
    expected = run(renewed(loaded, None), asked)
    engine = renewed(loaded, right_until_wrong(answers_of(asked, expected)))
    found = run(engine, asked)
    assert_equal(loaded, found, expected)


def test_pair_of_prefill_and_decode_engines_drafts_on_the_decode_side(folder_of: Callable[[str], Path]) -> None:
    asked = requests(params_of("sampled"))
    config = EngineConfig(model=str(folder_of("llama")), dtype="float32", **SIZES)
    pair = CheckedPair.load(config)
    expected = run(pair, asked)
    again = [replace(one, request_id=f"again-{one.request_id}") for one in asked]
    answers = dict(zip((one.key for one in again), answers_of(asked, expected).values(), strict=True))
    for engine in (pair.prefill, pair.decode):
        engine._speculator = eager_speculator(engine.scheduler.drafts, right_until_wrong(answers))
    assert said(run(pair, again)) == said(expected)
    assert counts(pair.prefill) == (0, 0), "each of its requests ends with its first token"
    assert counts(pair.decode)[0] > 0
    pair.assert_nothing_is_held()
    pair.close()


def test_ranks_verify_the_drafts_of_rank_0(folder_of: Callable[[str], Path]) -> None:
    asked = requests(params_of("sampled"))
    config = EngineConfig(model=str(folder_of("llama")), dtype="float32", runner="native", tensor_parallel_size=2, **SIZES)
    loaded = load_engine(config, launcher=ThreadLauncher())
    expected = run(renewed(loaded, None), asked)
    engine = renewed(loaded, right_until_wrong(answers_of(asked, expected)))
    assert said(run(engine, asked)) == said(expected)
    assert counts(engine)[0] > 0
    loaded.close()
