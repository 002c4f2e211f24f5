"""A runner whose logits come from a table."""

from __future__ import annotations

import torch

from replicas.attention.step_tensors import StepTensors
from replicas.model.runner import StepResult

VOCAB_SIZE = 50


class TableRunner:
    """Logits that depend on a row's token and position alone, and never on the other rows of the step."""

    def __init__(self) -> None:
        self._table = torch.randn(97, VOCAB_SIZE, generator=torch.Generator().manual_seed(5)) * 1.5
        self.bad_position = -1  # a row at this position gives NaN

    def row(self, token_id: int, position: int) -> torch.Tensor:
        """The logits [V] behind `token_id` at `position`."""
        return self._table[(31 * token_id + 7 * position) % 97]

    def forward(self, step: StepTensors) -> StepResult:
        tokens_N, positions_N = step.token_ids_T[step.logit_rows], step.positions_T[step.logit_rows]
        logits_NV = self._table[(31 * tokens_N + 7 * positions_N) % 97].clone()
        logits_NV[positions_N == self.bad_position] = float("nan")
        return StepResult(logits_NV=logits_NV)
