"""A linear of a drafting head, on the kernels of the native runner where there are some. Shapes: R rows, K inputs, N outputs."""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from replicas.model.native_decoder import as_struct
from replicas.native.memory import HugePageMemory
from replicas.native.packing import FLOAT_ELEMENTS, PackedLinear, pack, padded
from replicas.native.thread_team import ThreadTeam


class HeadLinear(Protocol):
    """y = W x + b, float32 in and out."""

    def __call__(self, x_RK: Tensor) -> Tensor: ...


class TorchLinear:
    """In torch, with weights in the target's dtype."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
        self._weight_NK = weight_NK.to(device, dtype)
        self._bias_N = None if bias_N is None else bias_N.to(device, torch.float32)

    def __call__(self, x_RK: Tensor) -> Tensor:
        y_RN = linear(x_RK.to(self._weight_NK.dtype), self._weight_NK).float()
        return y_RN if self._bias_N is None else y_RN + self._bias_N


class KernelLinear:
    """By the kernels that multiply the target's weights: one call, and a row's result does not depend on the rows beside it."""

    def __init__(self, packed: PackedLinear, bias_N: Tensor | None, library: ctypes.CDLL, team: ThreadTeam, memory: HugePageMemory) -> None:
        self._library, self._team, self._num_outputs = library, team, packed.num_outputs
        self._keep: list[Tensor] = []
        self._bias_N = None if bias_N is None else bias_N.float()

        def hold(tensor: Tensor) -> int:
            self._keep.append(memory.copy(tensor))
            return self._keep[-1].data_ptr()

        self._struct = as_struct(packed, hold)

    def __call__(self, x_RK: Tensor) -> Tensor:
        x_RK = x_RK.float().contiguous()
        out_RN = torch.empty(x_RK.shape[0], padded(self._num_outputs), dtype=torch.float32)
        self._library.manta_multiply(
            ctypes.c_void_p(x_RK.data_ptr()), ctypes.c_int64(x_RK.shape[0]), ctypes.byref(self._struct),
            ctypes.c_void_p(out_RN.data_ptr()), self._team.pointer,
        )  # fmt: skip
        y_RN = out_RN[:, : self._num_outputs]
        return y_RN if self._bias_N is None else y_RN + self._bias_N


class HeadLinears:
    """Makes the linears of one head: all in one memory, on the same kernels."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device, library: ctypes.CDLL | None, team: ThreadTeam | None) -> None:
        """`library` are the kernels of the native runner, which work on `team`; without them torch computes."""
        self._dtype, self._device = dtype, device
        self._library = library if dtype in FLOAT_ELEMENTS and device.type == "cpu" else None
        self._team = team
        self._memory = HugePageMemory()
        self.num_bytes = 0
        """Of all weights made so far."""

    def make(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> HeadLinear:
        weight_NK = weight_NK.to(self._dtype)
        self.num_bytes += weight_NK.numel() * weight_NK.element_size()
        if self._library is None or self._team is None:
            return TorchLinear(weight_NK, bias_N, self._dtype, self._device)
        return KernelLinear(pack(weight_NK, FLOAT_ELEMENTS[self._dtype]), bias_N, self._library, self._team, self._memory)
