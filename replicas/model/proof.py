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

from kvcache.tensors import bytes_per_token
from replicas.engine_config import EngineConfig
from replicas.model.default_model import DefaultModelError
from replicas.model.kv_sizing import size_kv
from replicas.model.loader import ModelChoice, choose_model
from replicas.model.runner import kv_groups, probe_layers
from replicas.model_support import UnsupportedModel
from replicas.sharding.checkpoint import INDEX
from replicas.sharding.empty_model import build_empty
from replicas.sharding.sharding import ShardingPlan

logger = logging.getLogger(__name__)

_UNLIMITED_BYTES = 2**62
_WEIGHTS = ("*.safetensors", "*.bin")


def prove(config: EngineConfig, *, has_gpu: bool) -> int:
    """Bytes of the model's weights. Raises ValueError with the line that a replica would fail with.

    A GPU that this machine lacks is another one's: what it decides (kernels, dtype, and with that the size of KV) stays open.
    """
    if has_gpu and not torch.cuda.is_available():
        config = replace(config, device="cpu", runner="transformers", quantization=None, kv_cache_bytes=None)
    choice = choose_model(config)
    folder = Path(choice.source)
    if folder.is_dir():
        require_weights(folder)
    largest_share = 1.0
    if config.tensor_parallel_size > 1:
        divided, checkpoint = build_empty(choice.hf_config, choice.source, choice.dtype, choice.trust_remote_code)
        plan = ShardingPlan.of(divided, config.tensor_parallel_size)
        largest_share = max(len(share.kv_heads) for share in plan.shares) / plan.shape.num_kv_heads
        if folder.is_dir():
            checkpoint.has("")  # raises for a folder that cannot be read in parts
    model = _without_memory(choice)
    check_kv(config, choice, model, largest_share)
    return sum(parameter.numel() * choice.dtype.itemsize for parameter in model.parameters())


def check_kv(config: EngineConfig, choice: ModelChoice, model: PreTrainedModel, largest_share: float) -> None:
    """Raises ValueError if `kv_cache_bytes` or the model's positions cannot hold what is asked for. `model` has no memory, and is left on
    our attention; `largest_share` of its KV heads is on one rank. Without `kv_cache_bytes` the budget is known at the start only."""
    try:
        per_token = bytes_per_token(kv_groups(probe_layers(model)), choice.dtype)
    except RuntimeError as error:  # a forward pass that looks at values, of which there are none
        logger.warning("the KV of %s is not proven: %s", choice.source, error)
        return
    size_kv(
        budget_bytes=_UNLIMITED_BYTES if config.kv_cache_bytes is None else config.kv_cache_bytes,
        budget_reason="kv_cache_bytes",
        bytes_per_token=round(largest_share * per_token),
        block_size=config.block_size,
        wanted_len=config.max_model_len,
        max_positions=getattr(choice.hf_config.get_text_config(decoder=True), "max_position_embeddings", None),
        max_num_seqs=config.max_num_seqs,
    )


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
