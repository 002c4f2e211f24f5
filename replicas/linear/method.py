"""The interface of a linear's format: its tensors, the floats that they encode, and their packing for the kernels. Letters: T rows of
activations, N outputs, K inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from replicas.native.packing import FLOAT_ELEMENTS, PackedLinear, pack

_DOT = ":"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Where a linear's outputs, or its inputs, lie in one of its tensors: every `unit` of them take `width` places along `dim`.

    Examples: one byte per weight is unit 1, width 1; eight codes per word unit 8, width 1; a scale per 128 inputs unit 128, width 1;
    32 codes of 3 bits in three words unit 32, width 3. Only whole units can be divided over ranks; the last one may be short.
    """

    dim: int
    unit: int = 1
    width: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a linear. A rank with a part of the linear's outputs (inputs) holds the same part of this tensor along `outputs`
    (`inputs`), and the whole tensor where that is None."""

    name: str
    """Name in the checkpoint, after the module's name and a dot."""
    shape: tuple[int, ...] | None
    """None: the checkpoint's shape."""
    dtype: torch.dtype | None = None
    """None: the model's dtype."""
    outputs: Axis | None = None
    inputs: Axis | None = None

    @property
    def key(self) -> str:
        """Name of the module's parameter; torch allows no dots there."""
        return self.name.replace(".", _DOT)


def name_in_checkpoint(parameter_name: str) -> str:
    return parameter_name.replace(_DOT, ".")


class LinearMethod(ABC):
    """One format of linears. Immutable and hashable; equal methods store weights in the same way.

    A checkpoint format is one file that implements this class, and one line in `formats.FORMATS`; loading, sharding and both runners
    use only this interface. Biases are not included: every format stores them as plain floats.
    """

    @abstractmethod
    def tensors(self, num_outputs: int, num_inputs: int) -> tuple[StoredTensor, ...]:
        """The tensors of one linear of this size, or of a rank's part of one. Raises ValueError for a size that the format cannot store."""

    @abstractmethod
    def weight(self, stored: Mapping[str, Tensor]) -> Tensor:
        """The weights [N, K] that the tensors, by name, encode, in any float dtype: the plain reference for the other methods."""

    def pack(self, name: str, parts: Sequence[Mapping[str, Tensor]], dtype: torch.dtype) -> PackedLinear:
        """Packs several linears as one for the native kernels, their outputs in order. Converts through floats of the model's `dtype`
        unless a format overrides it; `name` is the joined linear's name."""
        return pack(self.joined_weight(parts).to(dtype), FLOAT_ELEMENTS[dtype])

    def run(self, x_TK: Tensor, stored: Mapping[str, Tensor], bias_N: Tensor | None) -> Tensor:
        """The outputs [T, N] in the activations' dtype; called by the linear modules of a transformers model."""
        return linear(x_TK, self.weight(stored).to(x_TK.dtype), bias_N)

    def joined_weight(self, parts: Sequence[Mapping[str, Tensor]]) -> Tensor:
        weights = [self.weight(stored) for stored in parts]
        return torch.cat(weights) if len(weights) > 1 else weights[0]
