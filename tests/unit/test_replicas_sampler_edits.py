"""What is done to logits before a draw, against transformers' own processors and hand calculation."""

import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from replicas.sampling.sampler import Sampler, edit_logits
from tests.unit.growing_state import state
from tests.unit.random_logits import random_logits


def edited(logits, one):
    work = logits.clone()
    edit_logits(work, [one] * len(work))
    return work


def test_repetition_penalty_equals_transformers():
    logits = random_logits(3, 30)
    prompt, output = [1, 2, 2, 29], [3, 2, 3]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + output] * 3), logits.clone())
    assert torch.equal(edited(logits, state(prompt=prompt, output=output, repetition_penalty=1.3)), expected)


@pytest.mark.parametrize("num_output", [0, 1, 2, 3])
def test_min_tokens_equals_transformers_min_new_tokens(num_output):
    logits = random_logits(2, 12)
    processor = MinNewTokensLengthLogitsProcessor(prompt_length_to_skip=3, min_new_tokens=2, eos_token_id=[4, 7])
    expected = processor(torch.zeros(2, 3 + num_output, dtype=torch.long), logits.clone())
    for ignore_eos in (False, True):
        one = state(prompt=[0, 0, 0], output=[0] * num_output, eos=[4, 7], min_tokens=2, ignore_eos=ignore_eos)
        assert torch.equal(edited(logits, one), expected)


def test_presence_and_frequency_penalties_follow_openai_formula():
    """mu[j] -> mu[j] - c[j] * alpha_frequency - (c[j] > 0) * alpha_presence, over the output alone; numbers by hand."""
    logits = torch.tensor([[1.0, 2.0, 3.0, -1.0]])
    one = state(prompt=[3, 3], output=[1, 2, 1], presence_penalty=0.5, frequency_penalty=0.25)
    assert edited(logits, one).tolist() == [[1.0, 2.0 - 0.5 - 0.5, 3.0 - 0.25 - 0.5, -1.0]]


def test_negative_penalties_raise_the_logit():
    one = state(output=[0], presence_penalty=-1.0, frequency_penalty=-0.5)
    assert edited(torch.tensor([[1.0, 0.0]]), one).tolist() == [[2.5, 0.0]]


def test_logit_bias_is_added_after_penalties():
    one = state(output=[1], repetition_penalty=2.0, logit_bias={1: 3.0, 0: -100.0})
    assert edited(torch.tensor([[1.0, 4.0]]), one).tolist() == [[-99.0, 5.0]]


def test_logit_bias_of_extreme_size_bans_or_forces_the_token():
    sampler = Sampler(3)
    logits = torch.tensor([[9.0, 0.0, 1.0]])
    assert sampler.sample(logits, [state(logit_bias={0: -1e308, 2: -1e308})]).token_ids == [1]
    assert sampler.sample(logits, [state(logit_bias={1: 1e308})]).token_ids == [1]
