"""Manta's own int8 and int4: weights of any format, quantized when they are loaded for the native kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.engine_config import Quantization
from replicas.linear.method import LinearMethod, StoredTensor
from replicas.linear.packed_cache import PackedCache
from replicas.native.packing import Element, PackedLinear, pack, unpack

ELEMENTS: Mapping[Quantization, Element] = {"int8": Element.INT8, "int4": Element.INT4}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeAtLoad(LinearMethod):
    """Groups of 32 inputs, rounded to nearest without calibration data (`native.packing`). `stored` decides how tensors are stored and
    divided."""

    stored: LinearMethod
    quantization: Quantization
    cache: PackedCache | None = None
    """Keeps quantized weights between starts; None quantizes every time."""

    def tensors(self, num_outputs: int, num_inputs: int) -> tuple[StoredTensor, ...]:
        return self.stored.tensors(num_outputs, num_inputs)

    def weight(self, stored: Mapping[str, Tensor]) -> Tensor:
        return unpack(pack(self.stored.weight(stored), ELEMENTS[self.quantization]))

    def pack(self, name: str, parts: Sequence[Mapping[str, Tensor]], dtype: torch.dtype) -> PackedLinear:
        weight_NK, element = self.stored.joined_weight(parts), ELEMENTS[self.quantization]
        return pack(weight_NK, element) if self.cache is None else self.cache.linear(name, weight_NK, element)
