"""How ranks divide heads, columns and vocabulary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.sharding.partition import COLUMN_UNIT, ModelShape, RankShare, largest_size, partition

SMOLLM2 = ModelShape(
    num_heads=9, num_kv_heads=3, num_columns=1536, vocab_size=49152, bytes_per_head=30 * 2 * 64 * 576,
    bytes_per_kv_head=30 * 2 * 64 * 576, bytes_per_column=30 * 3 * 576, bytes_per_token=576,
)  # fmt: skip


def _weights(shape: ModelShape, share: RankShare) -> int:
    return (
        len(share.heads) * shape.bytes_per_head
        + len(share.kv_heads) * shape.bytes_per_kv_head
        + len(share.columns) * shape.bytes_per_column
        + len(share.tokens) * shape.bytes_per_token
    )


def _total(shape: ModelShape) -> int:
    whole = RankShare(
        heads=range(shape.num_heads), kv_heads=range(shape.num_kv_heads), columns=range(shape.num_columns), tokens=range(shape.vocab_size)
    )
    return _weights(shape, whole)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    num_kv_heads = draw(st.integers(1, 8))
    weights = [draw(st.integers(1, 10_000)) for _ in range(4)]
    return ModelShape(
        num_heads=num_kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=num_kv_heads,
        num_columns=draw(st.integers(1, 500)),
        vocab_size=draw(st.integers(1, 2000)),
        bytes_per_head=weights[0],
        bytes_per_kv_head=weights[1],
        bytes_per_column=weights[2],
        bytes_per_token=weights[3],
    )


@given(shape=shapes(), data=st.data())
def test_partition_of_any_shape_covers_everything_once_and_leaves_no_rank_empty(shape: ModelShape, data: st.DataObject) -> None:
    shares = partition(shape, data.draw(st.integers(1, largest_size(shape))))
    for name, total in (("heads", shape.num_heads), ("columns", shape.num_columns), ("tokens", shape.vocab_size)):
        assert [piece for share in shares for piece in getattr(share, name)] == list(range(total))
        assert all(len(getattr(share, name)) > 0 for share in shares)
    assert {head for share in shares for head in share.kv_heads} == set(range(shape.num_kv_heads))
    group = shape.num_heads // shape.num_kv_heads
    for share in shares:
        assert {head // group for head in share.heads} == set(share.kv_heads), "each query head finds its KV head on its rank"
        assert len(share.heads) % len(share.kv_heads) == 0


def test_default_model_at_two_holds_half_on_each_rank_although_its_heads_do_not_divide() -> None:
    shares = partition(SMOLLM2, 2)
    assert [len(share.kv_heads) for share in shares] == [2, 1]
    assert [len(share.heads) for share in shares] == [6, 3]
    assert all(len(share.columns) % COLUMN_UNIT == 0 for share in shares)
    assert len(shares[0].columns) < len(shares[1].columns), "the rank with less attention has more of the MLP"
    half = _total(SMOLLM2) / 2
    assert all(abs(_weights(SMOLLM2, share) - half) <= SMOLLM2.bytes_per_token for share in shares)


def test_default_model_at_three_is_divided_evenly() -> None:
    for share in partition(SMOLLM2, 3):
        assert (len(share.heads), len(share.kv_heads), len(share.columns), len(share.tokens)) == (3, 1, 512, 16384)


def test_more_ranks_than_kv_heads_share_a_kv_head_and_divide_its_queries() -> None:
    shares = partition(SMOLLM2, 5)
    assert [list(share.kv_heads) for share in shares] == [[0], [0], [1], [1], [2]]
    assert [len(share.heads) for share in shares] == [2, 1, 2, 1, 3]


@pytest.mark.parametrize("size", [0, 10, 64])
def test_size_that_cannot_divide_the_model_is_refused_with_those_that_can(size: int) -> None:
    with pytest.raises(ValueError, match=rf"tensor_parallel_size {size} cannot divide 9 query heads .* sizes from 1 to 9 work"):
        partition(SMOLLM2, size)
