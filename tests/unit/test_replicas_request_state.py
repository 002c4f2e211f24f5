"""The request as scheduler and sampler see it: tokens, position, stop tokens, counts, mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.hashing import CacheIdentity
from kvcache.prefix_cache import BlockKeyChain
from replicas.request import GenerationRequest
from replicas.sampling.sampling_state import LogitsMask
from replicas.sampling_params import SamplingParams
from replicas.scheduling.request_state import RequestState
from tests.unit.hand_grammar import FakeMask


def new_state(
    prompt: Sequence[int], output: Sequence[int] = (), eos: frozenset[int] = frozenset(), mask: LogitsMask | None = None, **params: object
) -> RequestState:
    request = GenerationRequest(
        request_id="r", prompt_ids=tuple(prompt), output_ids=tuple(output), params=SamplingParams(**{"max_tokens": None, **params}), seed=1
    )
    return RequestState(
        request, arrival_number=0, chain=BlockKeyChain(CacheIdentity(), 4), max_num_tokens=1000, eos_token_ids=eos, mask=mask
    )


def test_state_with_output_ids_starts_at_their_position() -> None:
    state = new_state([5, 6], [7, 8, 9])
    assert state.sampling.position == 3
    state.append(1)
    assert (state.sampling.position, state.token_ids) == (4, [5, 6, 7, 8, 9, 1])
    state.go_back(3)
    assert (state.sampling.position, state.token_ids) == (1, [5, 6, 7])


def test_state_does_not_go_back_beyond_its_output() -> None:
    state = new_state([5], [7])
    with pytest.raises(ValueError, match=r"num_tokens must be in \[0, 1\], got 2"):
        state.go_back(2)
    assert state.token_ids == [5, 7]


def test_state_under_ignore_eos_stops_at_stop_tokens_alone_and_min_tokens_suppresses_both() -> None:
    state = new_state([5], eos=frozenset({2, 3}), ignore_eos=True, stop_token_ids=(9,), min_tokens=2)
    assert state.stop_token_ids == {9}
    assert state.sampling.suppressed_ids == (2, 3, 9)
    state.append(1)
    state.append(1)
    assert state.sampling.suppressed_ids == ()
    state.go_back(1)
    assert state.sampling.suppressed_ids == (2, 3, 9)
    assert new_state([5], eos=frozenset({2})).stop_token_ids == {2}


def test_mask_follows_resume_appends_and_going_back() -> None:
    mask = FakeMask(lambda tokens: (), 32)
    state = new_state([5], [1, 2], mask=mask)
    state.append(3)
    state.go_back(2)
    state.append(4)
    assert mask.tokens == [1, 4]


@given(
    prompt=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    resumed=st.lists(st.integers(0, 9), max_size=8),
    read_first=st.booleans(),
    steps=st.lists(st.one_of(st.integers(0, 9), st.tuples(st.integers(1, 4))), max_size=30),
)
def test_token_counts_equal_a_recount(prompt: list[int], resumed: list[int], read_first: bool, steps: list[int | tuple[int]]) -> None:
    state = new_state(prompt, resumed, repetition_penalty=1.5)
    output = list(resumed)
    if read_first:
        state.sampling.token_counts()
    for step in steps:
        if isinstance(step, int):
            state.append(step)
            output.append(step)
        else:
            count = min(step[0], len(output))
            state.go_back(count)
            del output[len(output) - count :]
    ids, counts = state.sampling.token_counts()
    expected = dict.fromkeys(prompt, 0) | Counter(output)
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == expected


def test_token_counts_grow_past_their_first_capacity() -> None:
    state = new_state([0])
    state.sampling.token_counts()
    for token_id in range(500):
        state.append(token_id)
    ids, counts = state.sampling.token_counts()
    assert ids.tolist() == list(range(500))
    assert counts.tolist() == [1] * 500


def test_state_decodes_once_it_has_caught_up_however_many_tokens_are_new() -> None:
    state = new_state(range(6))
    state.num_computed_tokens = 4
    assert not state.is_decoding
    state.num_computed_tokens = 6
    for token_id in (7, 8, 9):
        state.append(token_id)
    assert (state.is_decoding, state.num_uncomputed_tokens) == (True, 3)
    state.num_computed_tokens = 0
    state.begin_catching_up()
    state.num_computed_tokens = 6
    assert not state.is_decoding, "it lost its blocks: what is known by now is computed again first"
