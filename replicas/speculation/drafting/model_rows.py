"""Runs rows of several requests through a whole model, for drafting. Shapes: R requests, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from replicas.attention.step_tensors import StepTensors
from replicas.model.runner import ModelRunner
from replicas.scheduling.step_arrays import StepArrays


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRows:
    """Tokens of one request at consecutive positions."""

    token_ids: Sequence[int]
    end: int
    """Position behind the last token."""
    block_ids: Sequence[int]
    """The request's blocks, with a slot for every position."""


def run_rows(runner: ModelRunner, rows: Sequence[ModelRows], block_size: int) -> Tensor:
    """Writes the rows' KV; returns the logits [R, V] of each request's last row, which the next run may overwrite."""
    lens_R = np.array([len(one.token_ids) for one in rows], dtype=np.int32)
    arrays = StepArrays.with_blocks(
        token_ids_T=np.array([token_id for one in rows for token_id in one.token_ids], dtype=np.int32),
        lens_R=lens_R,
        context_lens_R=np.array([one.end for one in rows], dtype=np.int32),
        blocks=np.array([block_id for one in rows for block_id in one.block_ids[: -(-one.end // block_size)]], dtype=np.int32),
        logit_rows_N=(np.cumsum(lens_R) - 1).astype(np.int32),
        block_size=block_size,
    )
    return runner.forward(StepTensors.from_arrays(arrays)).logits_NV
