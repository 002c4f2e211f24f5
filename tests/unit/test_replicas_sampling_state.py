"""The request as the sampler sees it: position, stop tokens, counts, mask."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.sampling.sampling_state import SamplingState
from replicas.sampling_params import SamplingParams


def test_state_with_output_ids_starts_at_their_position():
    state = SamplingState(SamplingParams(), 1, 0, [5, 6], output_ids=[7, 8, 9])
    assert state.position == 3
    state.append(1)
    assert state.position == 4
    state.rollback(3)
    assert state.position == 1


def test_state_rollback_beyond_the_output_is_refused():
    state = SamplingState(SamplingParams(), 1, 0, [5], output_ids=[7])
    with pytest.raises(ValueError, match=r"num_tokens must be in \[0, 1\], got 2"):
        state.rollback(2)


def test_state_stop_ids_leave_out_eos_under_ignore_eos_but_min_tokens_suppresses_it():
    params = SamplingParams(ignore_eos=True, stop_token_ids=(9,), min_tokens=2)
    state = SamplingState(params, 1, 0, [5], eos_token_ids=frozenset({2, 3}))
    assert state.stop_ids == {9}
    assert state.suppressed_ids == (2, 3, 9)
    state.append(1)
    state.append(1)
    assert state.suppressed_ids == ()
    assert SamplingState(SamplingParams(), 1, 0, [5], eos_token_ids=frozenset({2})).stop_ids == {2}


class RecordingMask:
    def __init__(self):
        self.tokens = []

    def advance(self, token_id):
        self.tokens.append(token_id)

    def rollback(self, num_tokens):
        del self.tokens[len(self.tokens) - num_tokens :]

    def fill(self, allowed_V):
        allowed_V[:] = False


def test_state_mask_follows_appends_rollbacks_and_resume():
    mask = RecordingMask()
    state = SamplingState(SamplingParams(), 1, 0, [5], output_ids=[1, 2], mask=mask)
    state.append(3)
    state.rollback(2)
    state.append(4)
    assert mask.tokens == [1, 4]


@given(
    prompt=st.lists(st.integers(0, 6), max_size=8),
    resumed=st.lists(st.integers(0, 9), max_size=8),
    read_first=st.booleans(),
    steps=st.lists(st.one_of(st.integers(0, 9), st.tuples(st.integers(1, 4))), max_size=30),
)
def test_state_token_counts_equal_a_recount(prompt, resumed, read_first, steps):
    state = SamplingState(SamplingParams(repetition_penalty=1.5), 1, 0, prompt, output_ids=resumed)
    output = list(resumed)
    if read_first:
        state.token_counts()
    for step in steps:
        if isinstance(step, int):
            state.append(step)
            output.append(step)
        else:
            count = min(step[0], len(output))
            state.rollback(count)
            del output[len(output) - count :]
    ids, counts = state.token_counts()
    expected = dict.fromkeys(prompt, 0) | Counter(output)
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == expected


def test_state_token_counts_grow_past_their_first_capacity():
    state = SamplingState(SamplingParams(), 1, 0, [0])
    state.token_counts()
    for token_id in range(500):
        state.append(token_id)
    ids, counts = state.token_counts()
    assert ids.tolist() == list(range(500))
    assert counts.tolist() == [1] * 500
