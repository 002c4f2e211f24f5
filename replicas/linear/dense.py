"""Plain float weights: the format of every checkpoint without a quantization config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from replicas.linear.method import Axis, LinearMethod, StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense(LinearMethod):
    """One float tensor `weight` [N, K], run by torch's own modules. An embedding is dense too: its outputs are the rows of its table."""

    is_transposed: bool = False
    """The tensor is [K, N], as in gpt2's Conv1D."""

    def tensors(self, num_outputs: int, num_inputs: int) -> tuple[StoredTensor, ...]:
        if self.is_transposed:
            return (StoredTensor(name="weight", shape=(num_inputs, num_outputs), outputs=Axis(dim=1), inputs=Axis(dim=0)),)
        return (StoredTensor(name="weight", shape=(num_outputs, num_inputs), outputs=Axis(dim=0), inputs=Axis(dim=1)),)

    def weight(self, stored: Mapping[str, Tensor]) -> Tensor:
        return stored["weight"].T if self.is_transposed else stored["weight"]
