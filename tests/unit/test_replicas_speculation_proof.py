"""What is proven of drafting before a replica is replaced; sizes are counted by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from replicas.engine.proof import prove
from replicas.engine_config import EngineConfig
from replicas.speculation_config import SpeculationConfig
from tests.tiny_models import save_tiny_model
from tests.unit.cyclic_models import write_eagle, write_medusa, write_target
from tests.unit.drafting_heads import write_tokenizer

TARGET_BYTES, HEAD_BYTES = 4 * 4 * 3 * 16 * 2, 4 * 2 * 12 * 2
"""Of KV a token, float32: layers, heads, dim, K and V of the target; heads, dim, K and V of the head."""


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_target(tmp_path_factory.mktemp("cycle"))
    write_tokenizer(folder, 48)
    return folder


def config_of(folder: Path, speculation: SpeculationConfig, **settings: object) -> EngineConfig:
    return replace(EngineConfig(model=str(folder), dtype="float32", block_size=4, max_model_len=8, speculation=speculation), **settings)


@pytest.mark.parametrize("method", ["none", "medusa", "eagle", "draft_model"])
def test_kv_of_the_drafter_counts(method: str, cycle: Path, tmp_path: Path) -> None:
    speculation, per_token = {
        "none": lambda: (SpeculationConfig(), TARGET_BYTES),
        "medusa": lambda: (SpeculationConfig(method="medusa", model=write_medusa(tmp_path)), TARGET_BYTES),
        "eagle": lambda: (SpeculationConfig(method="eagle", model=write_eagle(tmp_path, is_eagle3=True)), TARGET_BYTES + HEAD_BYTES),
        "draft_model": lambda: (SpeculationConfig(method="draft_model", model=str(cycle)), 2 * TARGET_BYTES),
    }[method]()
    plain_bytes = prove(config_of(cycle, SpeculationConfig()), has_gpu=False)
    proven_bytes = prove(config_of(cycle, speculation, kv_cache_bytes=8 * per_token), has_gpu=False)
    assert (proven_bytes > plain_bytes) == (method != "none")
    if method == "draft_model":
        assert proven_bytes == 2 * plain_bytes
    with pytest.raises(ValueError, match="hold fewer than 2 blocks"):
        prove(config_of(cycle, speculation, kv_cache_bytes=8 * per_token - 1), has_gpu=False)


def test_drafting_that_cannot_be_loaded_is_told_before(cycle: Path, tmp_path: Path) -> None:
    cases = [
        (SpeculationConfig(method="eagle", model="/nowhere"), {}, "the folder /nowhere does not exist"),
        (SpeculationConfig(method="auto", model=write_medusa(tmp_path / "medusa")), {"model": str(save_tiny_model("llama", tmp_path))},
         "hidden size of 48; the target's is 32"),
        (SpeculationConfig(method="twin"), {"runner": "transformers"}, "'twin' needs the native runner"),
        (SpeculationConfig(method="twin"), {"tensor_parallel_size": 2}, "'twin' needs tensor_parallel_size 1"),
    ]  # fmt: skip
    for speculation, settings, message in cases:
        with pytest.raises(ValueError, match=message):
            prove(config_of(cycle, speculation, **settings), has_gpu=False)
