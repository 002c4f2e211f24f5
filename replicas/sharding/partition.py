"""How the ranks of a group divide a model: heads, MLP columns and vocabulary. Free of torch.

Attention is divided by KV head, together with the query heads that read it. Where heads do not divide evenly, a rank with less
attention gets more of the MLP and of the vocabulary, so that all ranks hold, and read in each step, nearly the same number of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

COLUMN_UNIT = 16
"""MLP columns are divided in multiples of this where there are enough; the native kernels compute 16 outputs together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The pieces of a model that can be divided, and the bytes of weights (over all layers) that belong to one piece."""

    num_heads: int
    num_kv_heads: int
    num_columns: int
    vocab_size: int
    bytes_per_head: int
    bytes_per_kv_head: int
    bytes_per_column: int
    bytes_per_token: int
    column_unit: int = 1
    """Number of MLP columns that the weights' format keeps together."""
    token_unit: int = 1
    """Number of rows of the output projection that the weights' format keeps together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """One rank's heads and columns of every layer, and its tokens. No field is empty."""

    heads: range
    kv_heads: range
    """Shared with neighbouring ranks where there are more ranks than KV heads."""
    columns: range
    """A range of the MLP's intermediate size."""
    tokens: range
    """Token ids whose rows of the embedding and of the output projection this rank holds."""


def partition(shape: ModelShape, num_ranks: int) -> tuple[RankShare, ...]:
    """One share a rank; together they cover everything. Raises ValueError with the sizes that work."""
    largest = largest_size(shape)
    if not 1 <= num_ranks <= largest:
        raise ValueError(
            f"tensor_parallel_size {num_ranks} cannot divide {shape.num_heads} query heads ({shape.num_kv_heads} KV heads) and "
            f"{shape.num_columns} MLP columns; sizes from 1 to {largest} work"
        )
    heads = _divide_heads(shape, num_ranks)
    attention = [len(q) * shape.bytes_per_head + len(kv) * shape.bytes_per_kv_head for q, kv in heads]
    unit = math.lcm(COLUMN_UNIT, shape.column_unit)
    if shape.num_columns < unit * num_ranks:
        unit = shape.column_unit
    columns = _divide_evenly(attention, shape.num_columns, shape.bytes_per_column, unit)
    held = [sum_ + len(c) * shape.bytes_per_column for sum_, c in zip(attention, columns, strict=True)]
    tokens = _divide_evenly(held, shape.vocab_size, shape.bytes_per_token, shape.token_unit)
    return tuple(RankShare(heads=q, kv_heads=kv, columns=c, tokens=t) for (q, kv), c, t in zip(heads, columns, tokens, strict=True))


def largest_size(shape: ModelShape) -> int:
    """The largest number of ranks such that each gets a query head, a unit of columns and a unit of tokens; smaller sizes work too."""
    return min(shape.num_heads, shape.num_columns // shape.column_unit, shape.vocab_size // shape.token_unit)


def _divide_heads(shape: ModelShape, num_ranks: int) -> list[tuple[range, range]]:
    """Query heads and KV heads of each rank."""
    group = shape.num_heads // shape.num_kv_heads
    if num_ranks <= shape.num_kv_heads:
        spans = _spans(_near_equal(shape.num_kv_heads, num_ranks))
        return [(range(kv.start * group, kv.stop * group), kv) for kv in spans]
    found = []
    for kv_head, num_sharing in enumerate(_near_equal(num_ranks, shape.num_kv_heads)):
        start = kv_head * group
        parts = _spans(_near_equal(group, num_sharing))
        found += [(range(start + part.start, start + part.stop), range(kv_head, kv_head + 1)) for part in parts]
    return found


def _near_equal(total: int, num_parts: int) -> list[int]:
    """Counts that differ by at most one, larger ones first."""
    return [total // num_parts + (part < total % num_parts) for part in range(num_parts)]


def _spans(counts: Sequence[int]) -> list[range]:
    starts = [sum(counts[:part]) for part in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def _divide_evenly(held: Sequence[int], num_pieces: int, bytes_per_piece: int, unit: int) -> list[range]:
    """Divides pieces so that the bytes on each rank, `held` included, are as even as whole units allow."""
    goal = (sum(held) + num_pieces * bytes_per_piece) / len(held)
    wanted = [max((goal - one) / bytes_per_piece, unit) for one in held]
    factor = num_pieces / sum(wanted)  # differs from 1 where some rank already holds more than the goal
    ends: list[int] = []
    exact = 0.0
    for rank, one in enumerate(wanted):
        exact += one * factor
        least = (ends[-1] if ends else 0) + unit
        most = num_pieces - unit * (len(held) - 1 - rank)
        ends.append(min(max(round(exact / unit) * unit, least), most))
    ends[-1] = num_pieces
    return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
