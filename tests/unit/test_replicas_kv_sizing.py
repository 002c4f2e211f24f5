"""How many KV blocks fit, with hand-counted sizes."""

from pathlib import Path
from typing import Any

import pytest

from replicas.model.kv_sizing import KVSize, _cgroup_available_bytes, cpu_budget_bytes, size_kv


def _size(**changes: Any) -> KVSize:
    settings: dict[str, Any] = {
        "budget_bytes": 1_000_000, "budget_reason": "a test", "bytes_per_token": 100, "block_size": 10, "wanted_len": None,
        "max_positions": 500, "max_num_seqs": 64,
    }  # fmt: skip
    return size_kv(**{**settings, **changes})


def test_size_takes_what_fits() -> None:
    size = _size()
    assert (size.num_blocks, size.max_model_len) == (1000, 500)


def test_size_takes_no_more_than_all_requests_can_use() -> None:
    size = _size(max_num_seqs=3)
    assert size.num_blocks == 150
    assert "max_num_seqs 3" in size.reason


def test_size_lowers_a_length_nobody_asked_for_and_says_so() -> None:
    size = _size(max_positions=100_000)
    assert size.max_model_len == 10_000
    assert "max_model_len lowered to 10000" in size.reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wanted_len": 501}, "positions for 500"),
        ({"wanted_len": 400, "budget_bytes": 30_000}, "raise kv_cache_bytes or lower max_model_len to 300"),
        ({"budget_bytes": 1_999}, "fewer than 2 blocks of 1000 bytes"),
        ({"budget_bytes": 20_000}, "hold only 200 tokens; raise kv_cache_bytes to at least 25600"),
    ],
)
def test_size_that_cannot_work_names_the_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _size(**changes)


def test_cpu_budget_is_what_was_configured() -> None:
    assert cpu_budget_bytes(123) == (123, "kv_cache_bytes")


def test_container_limit_bounds_the_memory_that_counts_as_available(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert _cgroup_available_bytes(tmp_path) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert _cgroup_available_bytes(tmp_path) > 2**60
