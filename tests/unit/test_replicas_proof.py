"""What is proven of an engine without its weights; sizes are counted from the files."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from replicas.engine.proof import memory_bytes, prove
from replicas.engine_config import EngineConfig
from replicas.model.without_memory import require_weights
from tests.tiny_models import CONFIGS

FolderOf = Callable[[str], Path]


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(folder), runner="transformers", dtype="float32")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_weight_bytes_are_those_of_the_checkpoint(folder_of: FolderOf, family: str) -> None:
    folder = folder_of(family)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        num_values = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no mapping
    assert prove(config_of(folder), has_gpu=False) == 4 * num_values
    assert prove(replace(config_of(folder), dtype="bfloat16"), has_gpu=False) == 2 * num_values


def test_ranks_that_cannot_divide_the_model_are_told_what_can(folder_of: FolderOf) -> None:
    assert prove(replace(config_of(folder_of("llama")), tensor_parallel_size=2), has_gpu=False) > 0
    with pytest.raises(ValueError, match=r"tensor_parallel_size 1000 cannot divide .*sizes from 1 to 4 work"):
        prove(replace(config_of(folder_of("llama")), tensor_parallel_size=1000), has_gpu=False)


LLAMA_BYTES_PER_TOKEN = 3 * 2 * 2 * 16 * 4
"""Layers, K and V, KV heads, dim, float32."""


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"kv_cache_bytes": 32 * LLAMA_BYTES_PER_TOKEN, "max_model_len": 32}, None),
        ({"kv_cache_bytes": 32 * LLAMA_BYTES_PER_TOKEN - 1, "max_model_len": 32}, "hold fewer than 2 blocks"),
        ({"kv_cache_bytes": 32 * LLAMA_BYTES_PER_TOKEN, "max_model_len": 33}, "max_model_len 33 needs"),
        ({"kv_cache_bytes": 16 * LLAMA_BYTES_PER_TOKEN, "max_model_len": 32, "tensor_parallel_size": 2}, None),  # a head on each
        ({"kv_cache_bytes": 16 * LLAMA_BYTES_PER_TOKEN - 1, "max_model_len": 32, "tensor_parallel_size": 2}, "hold fewer than 2 blocks"),
        ({"max_model_len": 128}, None),
        ({"max_model_len": 129}, "the model has positions for 128 tokens"),
    ],
)
def test_kv_that_cannot_hold_what_is_asked_for_is_refused(folder_of: FolderOf, settings: dict[str, int], error: str | None) -> None:
    config = replace(config_of(folder_of("llama")), **settings)
    if error is None:
        assert prove(config, has_gpu=False) > 0
    else:
        with pytest.raises(ValueError, match=error):
            prove(config, has_gpu=False)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_is_proven(folder_of: FolderOf, caplog: pytest.LogCaptureFixture, family: str) -> None:
    assert prove(config_of(folder_of(family)), has_gpu=False) > 0
    assert "is not proven" not in caplog.text


def test_folder_without_weights_is_refused(folder_of: FolderOf, tmp_path: Path) -> None:
    shutil.copy(folder_of("llama") / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"has a config\.json but no weights"):
        prove(config_of(tmp_path), has_gpu=False)


def test_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").touch()
    with pytest.raises(ValueError, match=r"lacks model-2\.safetensors"):
        require_weights(tmp_path)
    (tmp_path / "model-2.safetensors").touch()
    require_weights(tmp_path)


def test_model_that_is_not_supported_is_refused(folder_of: FolderOf, tmp_path: Path) -> None:
    shutil.copytree(folder_of("llama"), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "is_encoder_decoder": True}))
    with pytest.raises(ValueError, match="is an encoder-decoder"):
        prove(config_of(tmp_path / "model"), has_gpu=False)


def test_what_only_the_gpu_of_another_machine_decides_is_left_open(folder_of: FolderOf) -> None:
    """This machine has none."""
    engine = EngineConfig(model=str(folder_of("llama")), device="cuda", kv_cache_bytes=1)
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        prove(engine, has_gpu=False)
    assert prove(engine, has_gpu=True) > 0


def test_memory_is_at_most_the_containers(tmp_path: Path) -> None:
    whole = memory_bytes(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_bytes(tmp_path) == whole
    (tmp_path / "memory.max").write_text("1048576\n")
    assert memory_bytes(tmp_path) == 2**20
