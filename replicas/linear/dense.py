"""Weights as they are: what every checkpoint has that says nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from replicas.linear.method import Axis, LinearMethod, StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense(LinearMethod):
    """One float tensor `weight` [N, K]. torch's own modules run it; an embedding is one whose outputs are the rows of its table."""

    is_transposed: bool = False
    """[K, N], as Conv1D of gpt2 has it."""

    def tensors(self, num_outputs: int, num_inputs: int) -> tuple[StoredTensor, ...]:
        if self.is_transposed:
            return (StoredTensor(name="weight", shape=(num_inputs, num_outputs), outputs=Axis(dim=1), inputs=Axis(dim=0)),)
        return (StoredTensor(name="weight", shape=(num_outputs, num_inputs), outputs=Axis(dim=0), inputs=Axis(dim=1)),)

    def weight(self, stored: Mapping[str, Tensor]) -> Tensor:
        return stored["weight"].T if self.is_transposed else stored["weight"]
