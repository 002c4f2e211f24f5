"""Packed weights: what comes back out of them, and the cache that keeps them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.linear import packed_cache
from replicas.linear.packed_cache import PackedCache, content_key
from replicas.native.packing import GROUP, Element, PackedLinear, pack, unpack


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


def _filled(folder: Path, key: str = "int8-a", max_bytes: int = 1 << 20) -> PackedLinear:
    cache = PackedCache(key, max_bytes, folder)
    packed = cache.linear("lm_head", _weight(20, 30), Element.INT8)
    cache.save()
    return packed


def _no_packing(*args: object) -> PackedLinear:
    raise AssertionError("it was packed again")


def test_cache_gives_what_was_packed_without_packing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _filled(tmp_path)
    monkeypatch.setattr(packed_cache, "pack", _no_packing)
    again = _filled(tmp_path)
    assert torch.equal(unpack(again), unpack(first))
    with pytest.raises(AssertionError, match="packed again"):
        _filled(tmp_path, "int8-b")


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: b""])
def test_damaged_cache_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object) -> None:
    first = _filled(tmp_path)
    file = tmp_path / "int8-a.safetensors"
    whole = file.read_bytes()
    file.write_bytes(damage(whole))  # type: ignore[operator]
    with caplog.at_level(logging.WARNING):
        assert torch.equal(unpack(_filled(tmp_path)), unpack(first))
    assert "is damaged" in caplog.text
    assert file.read_bytes() == whole


def _used_at(folder: Path, seconds: dict[str, int]) -> None:
    for key, second in seconds.items():
        os.utime(folder / f"{key}.safetensors", (second, second))


def test_cache_over_its_bound_loses_what_was_used_longest_ago(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _filled(tmp_path, "int8-a")
    size = (tmp_path / "int8-a.safetensors").stat().st_size
    _filled(tmp_path, "int8-b")
    abandoned = tmp_path / "tmp-of-a-killed-process" / "int8-c.safetensors"
    abandoned.parent.mkdir()
    abandoned.write_bytes(b"x" * size)
    os.utime(abandoned, (300, 300))
    _used_at(tmp_path, {"int8-a": 100, "int8-b": 200})
    _filled(tmp_path, "int8-a")  # a use: now b is the oldest
    with caplog.at_level(logging.INFO):
        _filled(tmp_path, "int8-d", max_bytes=2 * size)
    assert sorted(path.name for path in tmp_path.rglob("*.s*")) == [
        "int8-a.safetensors", "int8-a.sha256", "int8-d.safetensors", "int8-d.sha256",
    ]  # fmt: skip
    assert "int8-b.safetensors (0 MiB), which was used longest ago" in caplog.text


def test_cache_too_small_for_a_model_keeps_the_others_and_not_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _filled(tmp_path, "int8-a")
    with caplog.at_level(logging.INFO):
        assert _filled(tmp_path, "int8-b", max_bytes=100).num_outputs == 20
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["int8-a.safetensors", "int8-a.sha256"]
    assert "quantized_cache_bytes is 100" in caplog.text


def test_cache_that_cannot_be_written_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way of the folder")
    with caplog.at_level(logging.WARNING):
        packed = _filled(tmp_path / "file")
    assert packed.num_outputs == 20
    assert "cannot keep the quantized weights" in caplog.text


def test_content_key_changes_with_one_weight_and_with_the_quantization() -> None:
    model = torch.nn.Linear(4, 4)
    before = content_key(model, "int8")
    assert content_key(model, "int8") == before
    assert content_key(model, "int4") != before
    with torch.no_grad():
        model.weight[3, 3] += 0.01
    assert content_key(model, "int8") != before
