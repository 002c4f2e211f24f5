"""Calls into the compiled kernels that more than one test module makes."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from replicas.model.native_decoder import as_struct
from replicas.native import build
from replicas.native.isa import InstructionSet
from replicas.native.packing import Element, PackedLinear, padded
from replicas.native.thread_team import ThreadTeam


def multiply(library: ctypes.CDLL, a_MK: torch.Tensor, packed: PackedLinear, num_threads: int = 2) -> torch.Tensor:
    """float32 [M, N] of contiguous float32 rows times packed weights."""
    out = torch.empty(a_MK.shape[0], padded(packed.num_outputs))
    keep: list[torch.Tensor] = []
    team = ThreadTeam(library, num_threads)
    linear = as_struct(packed, lambda tensor: keep.append(tensor) or tensor.data_ptr())
    library.manta_multiply(
        ctypes.c_void_p(a_MK.data_ptr()), ctypes.c_int64(a_MK.shape[0]), ctypes.byref(linear), ctypes.c_void_p(out.data_ptr()),
        team.pointer,
    )  # fmt: skip
    return out[:, : packed.num_outputs]


def as_multiplied(a_MK: torch.Tensor, element: Element, isa: InstructionSet) -> torch.Tensor:
    """float32 [M, K]: what a variant of the kernels makes of its activations before weights of this type multiply them."""
    if element.is_quantized and isa.rounds_for_quantized:
        most_M1 = a_MK.abs().amax(-1, keepdim=True)
        return (a_MK * (32639 / most_M1)).round() * (most_M1 / 32639)
    return a_MK.bfloat16().float() if element is Element.BFLOAT16 and isa.rounds_for_bfloat16 else a_MK


def assembly_of_tile(isa: InstructionSet, element: str, folder: Path) -> str:
    """What the compiler makes of a tile of `matmul.h` over `manta::<element>`. Skips the test where it knows no such instructions."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    source = folder / "tile.cpp"
    source.write_text("#include <cstdint>\n")
    command = [str(compiler), *build.FLAGS, *isa.compiler_flags, f"-I{build.SOURCE.parent}", "-S", "-O1", str(source), "-o", "-"]
    if compiler is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"waits for a compiler that knows {isa.compiler_flags[-1]}")
    source.write_text(
        '#include "matmul.h"\n'
        "template void manta::multiply_panels<1>(const float*, const manta::Tiles&, int64_t, int64_t, "
        f"const manta::PackedWeight<manta::{element}>&, int64_t, float*);"
    )
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
