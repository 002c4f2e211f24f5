"""A step as bytes and back."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replicas.attention.step_tensors import StepTensors
from replicas.ranks.step_message import decode_step, encode_step
from replicas.scheduling.step_arrays import StepArrays


@st.composite
def steps(draw: st.DrawFn) -> StepArrays:
    block_size = draw(st.sampled_from([1, 4, 16]))
    lens = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    contexts = [length + draw(st.integers(0, 50)) for length in lens]
    num_blocks = sum(-(-context // block_size) for context in contexts)
    ids = st.integers(0, 2**31 - 1)
    return StepArrays.with_blocks(
        token_ids_T=np.array(draw(st.lists(ids, min_size=sum(lens), max_size=sum(lens))), dtype=np.int32),
        lens_R=np.array(lens, dtype=np.int32),
        context_lens_R=np.array(contexts, dtype=np.int32),
        blocks=np.array(draw(st.lists(st.integers(0, 2**20), min_size=num_blocks, max_size=num_blocks)), dtype=np.int32),
        logit_rows_N=np.array(draw(st.lists(st.integers(0, sum(lens) - 1), unique=True).map(sorted)), dtype=np.int32),
        block_size=block_size,
    )


@given(step=steps())
def test_decoded_step_gives_the_tensors_of_the_encoded_one(step: StepArrays) -> None:
    found, expected = StepTensors.from_arrays(decode_step(encode_step(step))), StepTensors.from_arrays(step)
    for name in ("token_ids_T", "positions_T", "slots_T", "query_starts_R1", "context_lens_R", "block_tables_RM", "logit_rows"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert (found.max_query_len, found.max_context_len) == (expected.max_query_len, expected.max_context_len)


def test_decode_step_of_32_requests_is_small() -> None:
    """32 requests of 300 tokens decode one token each: 19 blocks, 5 numbers a request beside them."""
    step = StepArrays.with_blocks(
        token_ids_T=np.zeros(32, np.int32), lens_R=np.ones(32, np.int32), context_lens_R=np.full(32, 300, np.int32),
        blocks=np.zeros(32 * 19, np.int32), logit_rows_N=np.arange(32, dtype=np.int32), block_size=16,
    )  # fmt: skip
    assert len(encode_step(step)) == 4 * (6 + 32 * (19 + 4))


@pytest.mark.parametrize("spoil", [lambda message: message[:-4], lambda message: message + bytes(4), lambda m: m[:20] + b"\7" + m[21:]])
def test_message_of_another_version_or_cut_short_is_refused(spoil: object) -> None:
    step = StepArrays.with_blocks(
        token_ids_T=np.zeros(1, np.int32), lens_R=np.ones(1, np.int32), context_lens_R=np.ones(1, np.int32),
        blocks=np.zeros(1, np.int32), logit_rows_N=np.zeros(1, np.int32), block_size=16,
    )  # fmt: skip
    with pytest.raises(ValueError, match="not of this version"):
        decode_step(spoil(encode_step(step)))  # type: ignore[operator]
