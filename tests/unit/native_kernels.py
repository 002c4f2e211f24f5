"""Calls into the compiled kernels that more than one test module makes."""

from __future__ import annotations

import ctypes

import torch

from replicas.native.decoder import as_struct
from replicas.native.isa import AVX512_BF16, EMULATED, InstructionSet
from replicas.native.packing import Element, PackedLinear, padded


def multiply(library: ctypes.CDLL, a_MK: torch.Tensor, packed: PackedLinear, num_threads: int = 2) -> torch.Tensor:
    """float32 [M, N] of contiguous float32 rows times packed weights."""
    out = torch.empty(a_MK.shape[0], padded(packed.num_outputs))
    keep: list[torch.Tensor] = []
    linear = as_struct(packed, lambda tensor: keep.append(tensor) or tensor.data_ptr())
    library.manta_multiply(
        ctypes.c_void_p(a_MK.data_ptr()), ctypes.c_int64(a_MK.shape[0]), ctypes.byref(linear), ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int32(num_threads),
    )  # fmt: skip
    return out[:, : packed.num_outputs]


def as_multiplied(a_MK: torch.Tensor, element: Element, isa: InstructionSet) -> torch.Tensor:
    """float32 [M, K]: what a variant of the kernels makes of its activations before weights of this type multiply them."""
    if element.is_quantized and isa.rounds_activations:
        most_M1 = a_MK.abs().amax(-1, keepdim=True)
        return (a_MK * (32639 / most_M1)).round() * (most_M1 / 32639)
    return a_MK.bfloat16().float() if element is Element.BFLOAT16 and isa in (AVX512_BF16, EMULATED) else a_MK
