"""Computes the heads of Medusa. Shapes: R rows, H hidden size, C rows of an output layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from replicas.speculation.heads.head_linear import HeadLinear, HeadLinears
from replicas.speculation.heads.medusa_files import MedusaWeights
from replicas.speculation.heads.target import HeadTarget


class MedusaHeads:
    """The heads of one target. Must be made before the target's runner takes over its weights."""

    def __init__(self, weights: MedusaWeights, target: HeadTarget) -> None:
        linears = HeadLinears(dtype=target.dtype, device=target.device, library=target.library, team=target.team)
        self._blocks = [[linears.make(block.weight_HH, block.bias_H) for block in head] for head in weights.blocks]
        self.token_ids_C = None if weights.token_ids_C is None else weights.token_ids_C.to(target.device)
        self._outputs: list[HeadLinear] | None = None
        if weights.output_CH is not None:
            self._outputs = [linears.make(output_CH) for output_CH in weights.output_CH]
        elif self.token_ids_C is not None:
            self._outputs = [linears.make(target.output_rows(self.token_ids_C))]
        self._target_logits = target.logits
        self.num_bytes = linears.num_bytes

    @property
    def num_heads(self) -> int:
        return len(self._blocks)

    def logits(self, hidden_RH: Tensor, num_heads: int) -> list[Tensor]:
        """Logits [R, C] of each of the first `num_heads` heads. A shared output layer is read once for all of them."""
        predicted: list[Tensor] = []
        for blocks in self._blocks[:num_heads]:
            x_RH = hidden_RH
            for block in blocks:
                x_RH = x_RH + silu(block(x_RH))
            predicted.append(x_RH)
        if self._outputs is not None and len(self._outputs) > 1:
            return [output(x_RH) for output, x_RH in zip(self._outputs, predicted, strict=False)]
        shared = self._target_logits if self._outputs is None else self._outputs[0]
        return list(shared(torch.cat(predicted)).chunk(len(predicted)))
