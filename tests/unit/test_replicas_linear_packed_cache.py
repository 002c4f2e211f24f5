"""The cache that keeps packed weights on disk."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from replicas.linear import packed_cache
from replicas.linear.packed_cache import PackedCache, content_key
from replicas.native.packing import Element, PackedLinear, unpack


def _filled(folder: Path, key: str = "int8-a", max_bytes: int = 1 << 20) -> PackedLinear:
    cache = PackedCache(key, max_bytes, folder)
    packed = cache.linear("lm_head", torch.randn(20, 30, generator=torch.Generator().manual_seed(0)), Element.INT8)
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
