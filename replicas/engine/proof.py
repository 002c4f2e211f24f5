"""Proves that engines can be loaded, without loading their weights: what would make a replica fail at its start is found before any other
is stopped for it.

`python -m replicas.engine.proof` reads pickled `list[tuple[EngineConfig, bool]]` (whether each is given a GPU) and writes one JSON object:
`{"memory_bytes": ..., "engines": [{"weight_bytes": ...} or {"error": "one line"}, ...]}`.
"""

from __future__ import annotations

import json
import logging
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedModel

from kvcache.tensors import bytes_per_token
from replicas.engine_config import EngineConfig
from replicas.model.default_model import DefaultModelError
from replicas.model.kv_sizing import size_kv
from replicas.model.loader import ModelChoice, choose_model
from replicas.model.runner import kv_groups, probe_layers
from replicas.model.without_memory import require_weights, without_memory
from replicas.sharding.empty_model import build_empty
from replicas.sharding.sharding import ShardingPlan
from replicas.speculation.drafting.proof import prove_drafting

logger = logging.getLogger(__name__)

_UNLIMITED_BYTES = 2**62


def prove(config: EngineConfig, *, has_gpu: bool) -> int:
    """Bytes of the weights of the model and of what drafts for it. Raises ValueError with the line that a replica would fail with.

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
    model = without_memory(choice)
    drafting = prove_drafting(config, choice)
    check_kv(config, choice, model, largest_share, drafting.kv_bytes_per_token)
    weight_bytes: int = sum(parameter.numel() * choice.dtype.itemsize for parameter in model.parameters())
    return weight_bytes + drafting.weight_bytes


def check_kv(config: EngineConfig, choice: ModelChoice, model: PreTrainedModel, largest_share: float, other_bytes_per_token: int) -> None:
    """Raises ValueError if `kv_cache_bytes` or the model's positions cannot hold what is asked for. `model` has no memory, and is left on
    our attention; `largest_share` of its KV heads is on one rank, beside `other_bytes_per_token` of a drafter. Without `kv_cache_bytes` the
    budget is known at the start only."""
    try:
        per_token = bytes_per_token(kv_groups(probe_layers(model)), choice.dtype)
    except RuntimeError as error:  # a forward pass that looks at values, of which there are none
        logger.warning("the KV of %s is not proven: %s", choice.source, error)
        return
    size_kv(
        budget_bytes=_UNLIMITED_BYTES if config.kv_cache_bytes is None else config.kv_cache_bytes,
        budget_reason="kv_cache_bytes",
        bytes_per_token=round(largest_share * per_token) + other_bytes_per_token,
        block_size=config.block_size,
        wanted_len=config.max_model_len,
        max_positions=getattr(choice.hf_config.get_text_config(decoder=True), "max_position_embeddings", None),
        max_num_seqs=config.max_num_seqs,
    )


def memory_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Of this machine, or of the container."""
    total: int = psutil.virtual_memory().total
    limit = root / "memory.max"
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        return min(total, int(text))
    return total


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
