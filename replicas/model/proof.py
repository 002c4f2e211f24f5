"""Proves that engines can be loaded, without loading their weights: what would make a replica fail at its start is found before any other
is stopped for it.

`python -m replicas.model.proof` reads pickled `list[tuple[EngineConfig, bool]]` (whether each is given a GPU) and writes one JSON object:
`{"memory_bytes": ..., "engines": [{"weight_bytes": ...} or {"error": "one line"}, ...]}`.
"""

from __future__ import annotations

import copy
import json
import logging
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from replicas.engine_config import EngineConfig
from replicas.model.default_model import DefaultModelError
from replicas.model.loader import ModelChoice, choose_model
from replicas.model_support import UnsupportedModel
from replicas.sharding.checkpoint import INDEX
from replicas.sharding.empty_model import build_empty
from replicas.sharding.sharding import ShardingPlan

_WEIGHTS = ("*.safetensors", "*.bin")


def prove(config: EngineConfig, *, has_gpu: bool) -> int:
    """Bytes of the model's weights. Raises ValueError with the line that a replica would fail with.

    A GPU that this machine lacks is another one's: what it decides (kernels, dtype) stays open.
    """
    if has_gpu and not torch.cuda.is_available():
        config = replace(config, device="cpu", runner="transformers", quantization=None)
    choice = choose_model(config)
    folder = Path(choice.source)
    if folder.is_dir():
        require_weights(folder)
    if config.tensor_parallel_size > 1:
        model, checkpoint = build_empty(choice.hf_config, choice.source, choice.dtype, choice.trust_remote_code)
        ShardingPlan.of(model, config.tensor_parallel_size)
        if folder.is_dir():
            checkpoint.has("")  # raises for a folder that cannot be read in parts
    else:
        model = _without_memory(choice)
    return sum(parameter.numel() * choice.dtype.itemsize for parameter in model.parameters())


def require_weights(folder: Path) -> None:
    """Raises ValueError if files that a load would look for are missing."""
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise ValueError(f"{folder} has a config.json but no weights (*.safetensors); copy them there, or name another folder")
    index = folder / INDEX
    if index.is_file():
        named = set(json.loads(index.read_text())["weight_map"].values())
        if missing := sorted(name for name in named if not (folder / name).is_file()):
            raise ValueError(f"{folder} lacks {', '.join(missing)}, which {INDEX} names; copy them there")


def memory_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Of this machine, or of the container."""
    total: int = psutil.virtual_memory().total
    limit = root / "memory.max"
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        return min(total, int(text))
    return total


def _without_memory(choice: ModelChoice) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                copy.deepcopy(choice.hf_config), dtype=choice.dtype, trust_remote_code=choice.trust_remote_code
            )
    except (OSError, ValueError, ImportError) as error:
        raise UnsupportedModel(f"cannot load {choice.source}: {str(error).strip().splitlines()[0]}") from error
    return model


def main() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    found: list[dict[str, object]] = []
    for config, has_gpu in pickle.load(sys.stdin.buffer):
        try:
            found.append({"weight_bytes": prove(config, has_gpu=has_gpu)})
        except (ValueError, DefaultModelError) as error:
            found.append({"error": " ".join(str(error).split())})
    sys.stdout.write(json.dumps({"memory_bytes": memory_bytes(), "engines": found}))


if __name__ == "__main__":
    main()
