"""The interface of a format of linears: its tensors, the floats that they stand for, and how they get into the kernels. Letters: T rows
of activations, N outputs, K inputs."""

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
    """Where a linear's outputs, or its inputs, lie in one of its tensors: each `unit` of them take `width` places along `dim`.

    A weight in bytes has unit 1 and width 1, eight codes in a word unit 8 and width 1, a scale for each 128 inputs unit 128 and width 1,
    32 codes of 3 bits in three words unit 32 and width 3. Only whole units can be divided over ranks; the last one may be short.
    """

    dim: int
    unit: int = 1
    width: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a linear. A rank that holds a part of the outputs (inputs) holds that part of `outputs` (`inputs`) here, and the whole
    tensor where that is None."""

    name: str
    """In the checkpoint, after the module's name and a dot."""
    shape: tuple[int, ...] | None
    """None: as the checkpoint has it."""
    dtype: torch.dtype | None = None
    """None: that of the model."""
    outputs: Axis | None = None
    inputs: Axis | None = None

    @property
    def key(self) -> str:
        """As a parameter of the module: torch allows no dots there."""
        return self.name.replace(".", _DOT)


def name_in_checkpoint(parameter_name: str) -> str:
    return parameter_name.replace(_DOT, ".")


class LinearMethod(ABC):
    """One format of linears. Immutable and hashable; equal methods store alike.

    A format of checkpoints implements it in one file and has a line in `formats.FORMATS`; loading, sharding and both runners know
    no more of it than this. Biases are no part of it: every format stores them plainly.
    """

    @abstractmethod
    def tensors(self, num_outputs: int, num_inputs: int) -> tuple[StoredTensor, ...]:
        """The tensors of one linear of this size, or of a rank's part of one. Raises ValueError for a size that the format cannot have."""

    @abstractmethod
    def weight(self, stored: Mapping[str, Tensor]) -> Tensor:
        """The weights [N, K] that tensors by name stand for, in any float dtype: the plain reference of all else."""

    def pack(self, name: str, parts: Sequence[Mapping[str, Tensor]], dtype: torch.dtype) -> PackedLinear:
        """Linears as one for the native kernels, the outputs of each after those of the one before. Goes through floats of the model's
        `dtype` unless a format knows better; `name` is that of the joined linear."""
        return pack(self.joined_weight(parts).to(dtype), FLOAT_ELEMENTS[dtype])

    def run(self, x_TK: Tensor, stored: Mapping[str, Tensor], bias_N: Tensor | None) -> Tensor:
        """The outputs [T, N], in the dtype of the activations, in a module of transformers."""
        return linear(x_TK, self.weight(stored).to(x_TK.dtype), bias_N)

    def joined_weight(self, parts: Sequence[Mapping[str, Tensor]]) -> Tensor:
        weights = [self.weight(stored) for stored in parts]
        return torch.cat(weights) if len(weights) > 1 else weights[0]
