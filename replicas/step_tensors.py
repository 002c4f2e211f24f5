"""One step's tokens and block tables as tensors. Letters of shapes: T packed tokens, R requests, M blocks of the longest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from replicas.step_plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """A packed step: every request's tokens one after the other, without padding."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    """int64 index block * block_size + offset where each token's K and V go."""
    query_starts_R1: torch.Tensor
    """int32, R + 1 prefix sums of the requests' token counts."""
    context_lens_R: torch.Tensor
    """int32, tokens in KV once this step has written its own."""
    block_tables_RM: torch.Tensor
    """int32, padded with 0."""
    logit_rows: torch.Tensor
    """int64 indices into T of the tokens whose logits are wanted, ascending: each chunk's scored ones, then its sampling one."""
    max_query_len: int
    max_context_len: int

    @classmethod
    def of(cls, plan: StepPlan, block_size: int, device: torch.device) -> StepTensors:
        chunks = plan.chunks
        lens_R = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int32)
        context_R = np.array([chunk.start + chunk.num_tokens for chunk in chunks], dtype=np.int32)
        starts_R1 = np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum(lens_R, out=starts_R1[1:])
        blocks_R = -(-context_R // block_size)
        tables_RM = np.zeros((len(chunks), int(blocks_R.max())), dtype=np.int32)
        token_ids: list[int] = []
        for row, chunk in enumerate(chunks):
            tables_RM[row, : blocks_R[row]] = chunk.state.block_ids[: blocks_R[row]]
            token_ids += chunk.state.token_ids[chunk.start : chunk.start + chunk.num_tokens]
        row_T = np.repeat(np.arange(len(chunks)), lens_R)
        positions_T = np.arange(len(token_ids)) - starts_R1[row_T] + (context_R - lens_R)[row_T]
        slots_T = tables_RM[row_T, positions_T // block_size].astype(np.int64) * block_size + positions_T % block_size
        return cls(
            token_ids_T=_tensor(np.array(token_ids, dtype=np.int64), device),
            positions_T=_tensor(positions_T.astype(np.int64), device),
            slots_T=_tensor(slots_T, device),
            query_starts_R1=_tensor(starts_R1, device),
            context_lens_R=_tensor(context_R, device),
            block_tables_RM=_tensor(tables_RM, device),
            logit_rows=_tensor(_logit_rows(plan, starts_R1), device),
            max_query_len=int(lens_R.max()),
            max_context_len=int(context_R.max()),
        )


def _logit_rows(plan: StepPlan, starts_R1: np.ndarray) -> np.ndarray:
    samples_R = np.array([chunk.samples for chunk in plan.chunks], dtype=bool)
    last_rows = (starts_R1[1:][samples_R] - 1).astype(np.int64)
    scored_rows = [
        np.arange(chunk.scored.start, chunk.scored.stop, dtype=np.int64) + int(start) - chunk.start
        for chunk, start in zip(plan.chunks, starts_R1, strict=False)
        if chunk.scored
    ]
    return np.sort(np.concatenate([*scored_rows, last_rows])) if scored_rows else last_rows


def _tensor(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
