"""A rank's part of a linear, as slices of the tensors that its format stores."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch.nn import Module

from replicas.linear.method import Axis, StoredTensor
from replicas.linear.modules import features, formatted

Side = Literal["outputs", "inputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPart:
    """A rank's part of one linear: some of its outputs, or some of its inputs, whose products the ranks add up."""

    side: Side
    ranges: tuple[range, ...]
    has_bias: bool = True
    """False where another rank adds the bias."""

    @property
    def size(self) -> int:
        return sum(map(len, self.ranges))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlice:
    """A rank's part of one parameter: `ranges` along `dim`, or zeros in its shape when `ranges` is empty."""

    dim: int
    ranges: tuple[range, ...]


class Indivisible(ValueError):
    """The part ends within a unit of the linear's format. The message reads as the end of a sentence that names the linear."""


def divide(module: Module, part: LinearPart) -> dict[str, ParameterSlice]:
    """Parameter key -> slice, for each parameter that a rank holds only in part. `module` has its undivided sizes. Raises Indivisible."""
    num_outputs, num_inputs = features(module)
    total = num_outputs if part.side == "outputs" else num_inputs
    slices = {}
    for tensor in formatted(module):
        if (axis := _axis(tensor, part.side)) is not None:
            slices[tensor.key] = ParameterSlice(dim=axis.dim, ranges=tuple(_places(span, axis, total, part.side) for span in part.ranges))
    if getattr(module, "bias", None) is not None:
        if part.side == "outputs":
            slices["bias"] = ParameterSlice(dim=0, ranges=part.ranges)
        elif not part.has_bias:
            slices["bias"] = ParameterSlice(dim=0, ranges=())
    return slices


def unit(modules: Iterable[Module], side: Side) -> int:
    """The smallest number of outputs (inputs) such that multiples of it divide all these modules."""
    tensors = [tensor for module in modules for tensor in formatted(module)]
    return math.lcm(*(axis.unit for tensor in tensors if (axis := _axis(tensor, side)) is not None))


def _axis(tensor: StoredTensor, side: Side) -> Axis | None:
    return tensor.outputs if side == "outputs" else tensor.inputs


def part_sizes(module: Module, part: LinearPart) -> tuple[int, int]:
    """Outputs and inputs of a rank's part of the module."""
    num_outputs, num_inputs = features(module)
    return (part.size, num_inputs) if part.side == "outputs" else (num_outputs, part.size)


def _places(span: range, axis: Axis, total: int, side: Side) -> range:
    if span.start % axis.unit or (span.stop % axis.unit and span.stop != total):
        raise Indivisible(f"{side} {span.start} to {span.stop} do not fall on units of {axis.unit}")
    return range(span.start // axis.unit * axis.width, -(-span.stop // axis.unit) * axis.width)
