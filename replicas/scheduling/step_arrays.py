"""One step as numpy arrays on the host. Free of torch. Shapes: T packed tokens, R requests, M blocks of the longest request,
N rows of logits, K rows of hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from replicas.scheduling.step_plan import StepPlan

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
BoolArray = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenRows:
    """Requested hidden states, see `step_plan.HiddenStates`."""

    layers: tuple[int, ...]
    rows_K: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    """Indices into T, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """A packed step: every request's tokens one after the other. Positions and slots follow from the fields and are not stored."""

    token_ids_T: IntArray
    lens_R: IntArray
    """Tokens of each request in this step."""
    context_lens_R: IntArray
    """Tokens in KV after this step, its own included."""
    block_tables_RM: IntArray
    """Padded with 0."""
    logit_rows_N: IntArray
    """Indices into T of the tokens whose logits are wanted, ascending."""
    block_size: int
    hidden: HiddenRows | None = None
    """Not sent to other ranks: rank 0 has complete hidden states."""

    @classmethod
    def of(cls, plan: StepPlan, block_size: int) -> StepArrays:
        chunks = plan.chunks
        context_R = np.array([chunk.start + chunk.num_tokens for chunk in chunks], dtype=np.int32)
        token_ids: list[int] = []
        blocks: list[int] = []
        for chunk, num_blocks in zip(chunks, (-(-context_R // block_size)).tolist(), strict=True):
            token_ids += chunk.state.token_ids[chunk.start : chunk.start + chunk.num_tokens - len(chunk.draft_ids)]
            token_ids += chunk.draft_ids
            blocks += chunk.state.block_ids[:num_blocks]
        return cls.with_blocks(
            token_ids_T=np.array(token_ids, dtype=np.int32),
            lens_R=np.array([chunk.num_tokens for chunk in chunks], dtype=np.int32),
            context_lens_R=context_R,
            blocks=np.array(blocks, dtype=np.int32),
            logit_rows_N=_rows(plan, [chunk.logits for chunk in plan.chunks]),
            block_size=block_size,
            hidden=None
            if plan.hidden is None
            else HiddenRows(layers=plan.hidden.layers, rows_K=_rows(plan, plan.hidden.positions).astype(np.int64)),
        )

    @classmethod
    def with_blocks(
        cls,
        *,
        token_ids_T: IntArray,
        lens_R: IntArray,
        context_lens_R: IntArray,
        blocks: IntArray,
        logit_rows_N: IntArray,
        block_size: int,
        hidden: HiddenRows | None = None,
    ) -> StepArrays:
        """`blocks` holds the block ids of all requests, one after the other."""
        is_block_RM = _is_block(context_lens_R, block_size)
        tables_RM = np.zeros(is_block_RM.shape, dtype=np.int32)
        tables_RM[is_block_RM] = blocks
        return cls(
            token_ids_T=token_ids_T,
            lens_R=lens_R,
            context_lens_R=context_lens_R,
            block_tables_RM=tables_RM,
            logit_rows_N=logit_rows_N,
            block_size=block_size,
            hidden=hidden,
        )

    def block_ids(self) -> IntArray:
        """Block ids of all requests, one after the other, without padding."""
        return self.block_tables_RM[_is_block(self.context_lens_R, self.block_size)]


def _rows(plan: StepPlan, positions: Sequence[range]) -> IntArray:
    """Indices into T of a range of positions of each chunk."""
    rows: list[int] = []
    start = 0
    for chunk, wanted in zip(plan.chunks, positions, strict=True):
        rows += range(wanted.start - chunk.start + start, wanted.stop - chunk.start + start)
        start += chunk.num_tokens
    return np.array(rows, dtype=np.int32)


def _is_block(context_lens_R: IntArray, block_size: int) -> BoolArray:
    num_blocks_R = -(-context_lens_R // block_size)
    is_block: BoolArray = np.arange(int(num_blocks_R.max()))[None, :] < num_blocks_R[:, None]
    return is_block
