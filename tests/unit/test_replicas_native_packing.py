"""Packed weights: what comes back out of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.native.packing import GROUP, Element, pack, pack_codes, unpack


def _weight(num_outputs: int, num_k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_outputs, num_k, generator=torch.Generator().manual_seed(seed)) * 0.1


shapes = {"num_outputs": st.integers(1, 70), "num_k": st.integers(1, 200), "seed": st.integers(0, 99)}


@settings(max_examples=40, deadline=None)
@given(**shapes, element=st.sampled_from([Element.FLOAT32, Element.BFLOAT16]))
def test_unpack_of_floats_gives_them_back(num_outputs: int, num_k: int, seed: int, element: Element) -> None:
    weight_NK = _weight(num_outputs, num_k, seed).to(torch.bfloat16 if element is Element.BFLOAT16 else torch.float32)
    assert torch.equal(unpack(pack(weight_NK, element)), weight_NK.float())


@settings(max_examples=40, deadline=None)
@given(**shapes, element=st.sampled_from([Element.INT8, Element.INT4]))
def test_quantized_weights_are_within_half_a_step_of_the_group(num_outputs: int, num_k: int, seed: int, element: Element) -> None:
    weight_NK = _weight(num_outputs, num_k, seed)
    padded_NGK = torch.nn.functional.pad(weight_NK, (0, -num_k % GROUP)).view(num_outputs, -1, GROUP)
    num_steps = 2**element.bits - 1
    step_NG = (padded_NGK.amax(-1) - padded_NGK.amin(-1)) / num_steps
    half_NK = step_NG.repeat_interleave(GROUP, 1)[:, :num_k] / 2
    # Scale and least are integers in units of a 32767th of the row's largest weight.
    slack_N1 = weight_NK.abs().amax(1, keepdim=True) / 32767 * 2
    assert bool(((unpack(pack(weight_NK, element)) - weight_NK).abs() <= half_NK + slack_N1).all())


@pytest.mark.parametrize("element", [Element.INT8, Element.INT4])
def test_rows_of_zeros_and_of_one_value_come_back(element: Element) -> None:
    weight_NK = torch.zeros(3, 64)
    weight_NK[1] = 0.25
    torch.testing.assert_close(unpack(pack(weight_NK, element)), weight_NK, rtol=1e-4, atol=0)


@pytest.mark.parametrize("element", Element)
def test_pack_in_pieces_equals_pack_at_once(element: Element, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_NK = _weight(70, 40).to(torch.bfloat16 if element is Element.BFLOAT16 else torch.float32)
    whole = unpack(pack(weight_NK, element))
    monkeypatch.setattr("replicas.native.packing._CHUNK_ELEMENTS", 16 * 40)
    assert torch.equal(unpack(pack(weight_NK, element)), whole)


@settings(max_examples=40, deadline=None)
@given(**shapes, element=st.sampled_from([Element.INT8, Element.INT4]))
def test_codes_are_packed_as_they_are(num_outputs: int, num_k: int, seed: int, element: Element) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_groups = -(-num_k // GROUP)
    u_NK = torch.randint(0, 2**element.bits, (num_outputs, num_k), generator=generator, dtype=torch.uint8)
    scale_NG = torch.randint(1, 2**15, (num_outputs, num_groups), generator=generator)
    least_NG = torch.randint(-(2**15), 2**15, (num_outputs, num_groups), generator=generator)
    units_N = torch.rand(num_outputs, generator=generator)
    group_K = torch.arange(num_k) // GROUP
    expected_NK = units_N[:, None] * (scale_NG[:, group_K] * u_NK + least_NG[:, group_K]).float()
    assert torch.equal(unpack(pack_codes(u_NK, scale_NG, least_NG, units_N, element)), expected_NK)
