"""A model's shapes without its weights, and whether these are there."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from replicas.model.loader import ModelChoice
from replicas.model_support import UnsupportedModel
from replicas.sharding.checkpoint import INDEX

_WEIGHTS = ("*.safetensors", "*.bin")


def require_weights(folder: Path) -> None:
    """Raises ValueError if files that a load would look for are missing."""
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise ValueError(f"{folder} has a config.json but no weights (*.safetensors); copy them there, or name another folder")
    index = folder / INDEX
    if index.is_file():
        named = set(json.loads(index.read_text())["weight_map"].values())
        if missing := sorted(name for name in named if not (folder / name).is_file()):
            raise ValueError(f"{folder} lacks {', '.join(missing)}, which {INDEX} names; copy them there")


def without_memory(choice: ModelChoice) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                copy.deepcopy(choice.hf_config), dtype=choice.dtype, trust_remote_code=choice.trust_remote_code
            )
    except (OSError, ValueError, ImportError) as error:
        raise UnsupportedModel(f"cannot load {choice.source}: {str(error).strip().splitlines()[0]}") from error
    return model
