"""Calls into the compiled kernels that more than one test module makes."""

from __future__ import annotations

import ctypes

import torch

from replicas.native.decoder import as_struct
from replicas.native.packing import PackedLinear, padded


def multiply(library: ctypes.CDLL, a_MK: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """float32 [M, N] of contiguous float32 rows times packed weights, on two threads."""
    out = torch.empty(a_MK.shape[0], padded(packed.num_outputs))
    keep: list[torch.Tensor] = []
    linear = as_struct(packed, lambda tensor: keep.append(tensor) or tensor.data_ptr())
    library.manta_multiply(
        ctypes.c_void_p(a_MK.data_ptr()), ctypes.c_int64(a_MK.shape[0]), ctypes.byref(linear), ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int32(2),
    )  # fmt: skip
    return out[:, : packed.num_outputs]
