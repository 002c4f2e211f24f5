"""Quantized weights as integers: their products, by the instruction and written out, and the activations that they meet."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.native.build import load_native_library, variant_of
from replicas.native.isa import AVX512_BF16, AVX512_VNNI, EMULATED, cpu_flags
from replicas.native.packing import Element, pack, unpack
from tests.unit.native_kernels import as_multiplied, assembly_of_tile, multiply

WIDTH = 16
QUANTIZED = pytest.mark.parametrize("element", [Element.INT8, Element.INT4])


@pytest.fixture(scope="module", params=[EMULATED, AVX512_BF16, AVX512_VNNI], ids=lambda isa: isa.name)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    if not request.param.cpu_flags <= cpu_flags():
        pytest.skip(f"waits for a CPU with {request.param.name}")
    return load_native_library(variants=[request.param])


lanes = st.tuples(st.integers(-(2**30), 2**30), *[st.integers(0, 255)] * 4, *[st.integers(-128, 127)] * 4)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(lanes, min_size=WIDTH, max_size=WIDTH))
def test_dot_of_bytes_is_exact(library: ctypes.CDLL, rows: list[tuple[int, ...]]) -> None:
    sums = (ctypes.c_int32 * WIDTH)(*(row[0] for row in rows))
    unsigned_bytes = (ctypes.c_uint8 * (4 * WIDTH))(*(byte for row in rows for byte in row[1:5]))
    signed_bytes = (ctypes.c_int8 * (4 * WIDTH))(*(byte for row in rows for byte in row[5:]))
    library.manta_add_byte_dots(sums, unsigned_bytes, signed_bytes, ctypes.c_int64(1))
    assert list(sums) == [row[0] + sum(u * s for u, s in zip(row[1:5], row[5:], strict=True)) for row in rows]


@QUANTIZED
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_numbers_of_a_group_do_not_overflow(library: ctypes.CDLL, element: Element, sign: int) -> None:
    weight_NK = torch.full((16, 64), 1.0)
    weight_NK[:, ::32] = -1.0  # so that all others are the largest u
    a_MK = torch.full((3, 64), sign * 7.0)
    exact_MN = a_MK.double() @ unpack(pack(weight_NK, element)).double().T
    torch.testing.assert_close(multiply(library, a_MK, pack(weight_NK, element)).double(), exact_MN, rtol=1e-6, atol=0)


@QUANTIZED
@pytest.mark.parametrize("outlier", [1.0, 1e3, 1e6])
@pytest.mark.parametrize(("num_rows", "num_k"), [(5, 130), (3, 3700), (100, 6600)])  # the last two: blocks of k, and of tiles
def test_activations_lose_half_a_step_of_their_row_and_no_more(
    library: ctypes.CDLL, element: Element, outlier: float, num_rows: int, num_k: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    a_MK = torch.randn(num_rows, num_k, generator=generator)
    a_MK[::2, 77] = outlier
    packed = pack(torch.randn(40, num_k, generator=generator), element)
    w_NK = unpack(packed).double()
    found_MN = multiply(library, a_MK, packed).double()
    half_step_M1 = a_MK.abs().amax(1, keepdim=True).double() / 32639 / 2
    bound_MN = half_step_M1 * w_NK.abs().sum(1)
    assert bool(((found_MN - a_MK.double() @ w_NK.T).abs() <= 1.001 * bound_MN).all())
    rounded_MN = as_multiplied(a_MK, element, variant_of(library)).double() @ w_NK.T
    assert bool(((found_MN - rounded_MN).abs() <= 1e-3 * bound_MN + 1e-6 * num_k).all())


@QUANTIZED
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_no_number_gives_nans_and_leaves_the_others(library: ctypes.CDLL, element: Element, bad: float) -> None:
    generator = torch.Generator().manual_seed(0)
    a_MK, packed = torch.randn(11, 70, generator=generator), pack(torch.randn(20, 70, generator=generator), element)
    whole_MN = multiply(library, a_MK, packed).clone()
    a_MK[4, 66:69] = bad
    found_MN = multiply(library, a_MK, packed)
    assert bool(found_MN[4].isnan().all())
    others = torch.arange(11) != 4
    assert torch.equal(found_MN[others], whole_MN[others])


@QUANTIZED
def test_rows_of_next_to_nothing_give_zeros_and_larger_ones_do_not(library: ctypes.CDLL, element: Element) -> None:
    packed = pack(torch.randn(20, 70, generator=torch.Generator().manual_seed(0)), element)
    for value in (0.0, 1e-42, 1e-31):
        assert not multiply(library, torch.full((3, 70), value), packed).any()
    small_MK = torch.full((3, 70), 2e-30)
    exact_MN = (small_MK.double() * 1e30) @ unpack(packed).double().T
    torch.testing.assert_close(multiply(library, small_MK, packed).double() * 1e30, exact_MN, rtol=1e-4, atol=1e-4)


def test_the_tile_compiles_to_the_instruction(tmp_path: Path) -> None:
    assert "vpdpbusd" in assembly_of_tile(AVX512_VNNI, "Int8", tmp_path)
