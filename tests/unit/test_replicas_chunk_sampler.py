"""Drafts change no token: an engine whose next tokens are drafted, well or badly, says the same as one without drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvcache.block_pool import BlockPool
from replicas.engine.engine import Engine
from replicas.model_description import ModelDescription
from replicas.request import GenerationRequest
from replicas.sampling.sampler import Sampler
from replicas.sampling_params import SamplingParams
from replicas.scheduling.scheduler import Scheduler
from replicas.scheduling.scheduler_config import SchedulerConfig
from tests.engine_harness import Generated
from tests.scripted_proposer import ScriptedProposer, eager_speculator
from tests.unit.hand_grammar import FakeMask
from tests.unit.table_runner import VOCAB_SIZE, TableRunner

EOS, NUM_TOKENS = 49, 30
PROMPTS = ([1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11])

Draft = Callable[[GenerationRequest, list[int], np.random.Generator], Sequence[int]]


def take_turns() -> FakeMask:
    """A grammar in which odd and even tokens take turns."""
    return FakeMask(lambda tokens: range((len(tokens) + 1) % 2, VOCAB_SIZE, 2), VOCAB_SIZE)


def generate(
    params: SamplingParams, draft: Draft | None, *, has_grammar: bool = False, bad_position: int = -1
) -> tuple[list[Generated], int]:
    """Outputs of all prompts, and the number of steps."""
    runner = TableRunner()
    runner.bad_position = bad_position
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, eos_token_ids=frozenset({EOS}))
    scheduler = Scheduler(config, BlockPool(40, 4))
    description = ModelDescription(max_model_len=64, vocab_size=VOCAB_SIZE, block_size=4, dtype="float32", tokenizer_source="none")
    random = np.random.default_rng(3)
    speculator = None
    if draft is not None:
        proposer = ScriptedProposer(lambda state, _: draft(state.request, state.token_ids[len(state.request.prompt_ids) :], random))
        speculator = eager_speculator(scheduler.drafts, proposer)
    engine = Engine(scheduler=scheduler, runner=runner, sampler=Sampler(VOCAB_SIZE), description=description, speculator=speculator)
    requests = [GenerationRequest(request_id=f"r{i}", prompt_ids=tuple(prompt), params=params, seed=i) for i, prompt in enumerate(PROMPTS)]
    results = {request.key: Generated() for request in requests}
    for request in requests:
        scheduler.add(request, take_turns() if has_grammar else None)
    num_steps = 0
    while engine.has_work:
        num_steps += 1
        for item in engine.step().progress:
            result = results[item.key]
            result.token_ids += item.token_ids
            result.logprobs += item.logprobs
            result.finish_reason = item.finish_reason
            result.error = item.error
        engine.check()
    return list(results.values()), num_steps


SETTINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "bias and min_tokens": {"temperature": 0.8, "logit_bias": {7: 3.0, EOS: 2.0}, "min_tokens": 12},
    "logprobs": {"temperature": 1.0, "logprobs": 3},
    "stop tokens": {"temperature": 1.0, "stop_token_ids": (3, 17, 22)},
}


@pytest.mark.parametrize("has_grammar", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_of_any_quality_change_neither_tokens_nor_logprobs(name: str, has_grammar: bool) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, **SETTINGS[name])
    expected, num_plain_steps = generate(params, None, has_grammar=has_grammar)
    answers = {request_id: result.token_ids for request_id, result in zip(("r0", "r1", "r2"), expected, strict=True)}

    def right(request: GenerationRequest, output: list[int], random: np.random.Generator) -> Sequence[int]:
        return answers[request.request_id][len(output) : len(output) + 5]

    def partly_right(request: GenerationRequest, output: list[int], random: np.random.Generator) -> Sequence[int]:
        num_right = int(random.integers(0, 5))
        return [*right(request, output, random)[:num_right], *random.integers(0, VOCAB_SIZE, 4).tolist()]

    for draft in (right, partly_right):
        found, num_steps = generate(params, draft, has_grammar=has_grammar)
        assert found == expected
        longest = max(len(tokens) for tokens in answers.values())
        assert num_steps < num_plain_steps or longest < 3, "no draft was ever accepted"


def test_logits_that_are_not_finite_behind_a_draft_fail_the_request_with_the_same_tokens_as_without() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected, _ = generate(params, None, bad_position=12)
    answers = {f"r{i}": result.token_ids for i, result in enumerate(generate(params, None)[0])}
    found, _ = generate(params, lambda request, output, _: answers[request.request_id][len(output) : len(output) + 5], bad_position=12)
    assert all("not finite" in (result.error or "") for result in expected)
    assert found == expected
