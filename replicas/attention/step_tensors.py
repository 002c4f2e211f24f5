"""One step's tokens and block tables as tensors. Shapes: T packed tokens, R requests, M blocks of the longest request."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from replicas.scheduling.step_arrays import StepArrays
from replicas.scheduling.step_plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """A packed step: every request's tokens one after the other, without padding. Created on the host; a runner moves it."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    """int64, block * block_size + offset: the slot of each token's K and V."""
    query_starts_R1: torch.Tensor
    """int32, R + 1 prefix sums of the requests' token counts."""
    context_lens_R: torch.Tensor
    """int32, tokens in KV after this step, its own included."""
    block_tables_RM: torch.Tensor
    """int32, padded with 0."""
    logit_rows: torch.Tensor
    """int64, indices into T of the tokens whose logits are wanted, ascending."""
    max_query_len: int
    max_context_len: int

    arrays: StepArrays
    """The same step on the host, with the requested hidden states; other ranks build their tensors from it."""

    @classmethod
    def of(cls, plan: StepPlan, block_size: int) -> StepTensors:
        return cls.from_arrays(StepArrays.of(plan, block_size))

    @classmethod
    def from_arrays(cls, arrays: StepArrays) -> StepTensors:
        lens_R, context_R, tables_RM, block_size = arrays.lens_R, arrays.context_lens_R, arrays.block_tables_RM, arrays.block_size
        starts_R1 = np.zeros(len(lens_R) + 1, dtype=np.int32)
        np.cumsum(lens_R, out=starts_R1[1:])
        row_T = np.repeat(np.arange(len(lens_R)), lens_R)
        positions_T = np.arange(len(row_T)) - starts_R1[row_T] + (context_R - lens_R)[row_T]
        slots_T = tables_RM[row_T, positions_T // block_size].astype(np.int64) * block_size + positions_T % block_size
        return cls(
            token_ids_T=torch.from_numpy(arrays.token_ids_T.astype(np.int64)),
            positions_T=torch.from_numpy(positions_T.astype(np.int64)),
            slots_T=torch.from_numpy(slots_T),
            query_starts_R1=torch.from_numpy(starts_R1),
            context_lens_R=torch.from_numpy(context_R),
            block_tables_RM=torch.from_numpy(tables_RM),
            logit_rows=torch.from_numpy(arrays.logit_rows_N.astype(np.int64)),
            max_query_len=int(lens_R.max()),
            max_context_len=int(context_R.max()),
            arrays=arrays,
        )

    def to(self, device: torch.device) -> StepTensors:
        """The same step on a device; itself if that is the host."""
        if device.type == "cpu":
            return self
        names = ("token_ids_T", "positions_T", "slots_T", "query_starts_R1", "context_lens_R", "block_tables_RM", "logit_rows")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})
