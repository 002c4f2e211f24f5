"""Proves that what drafts can be loaded, without the target's weights and without a draft model's."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from kvcache.tensors import bytes_per_token
from replicas.engine_config import EngineConfig
from replicas.model.loader import ModelChoice
from replicas.model.runner import kv_groups, probe_layers
from replicas.model.without_memory import require_weights, without_memory
from replicas.speculation.drafting.load import (
    check_twin,
    choose_draft_model,
    method_of_model,
    model_of,
    token_map,
    twin_bytes,
)
from replicas.speculation.heads.eagle_files import read_eagle
from replicas.speculation.heads.eagle_layer import kv_group
from replicas.speculation.heads.medusa_files import read_medusa

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenDrafting:
    """What drafting will take beside the target, as far as it is known before the start."""

    weight_bytes: int = 0
    kv_bytes_per_token: int = 0


def prove_drafting(config: EngineConfig, target: ModelChoice) -> ProvenDrafting:
    """Raises ValueError with the line that a replica would fail with."""
    method = method_of_model(config.speculation)
    if method in ("medusa", "eagle"):
        return _prove_head(method, model_of(config.speculation), target)
    if method == "twin":
        check_twin(config, is_native=target.native_library is not None)
        return ProvenDrafting(weight_bytes=twin_bytes(config, without_memory(target)))
    if method == "draft_model":
        return _prove_draft_model(config, target)
    return ProvenDrafting()


def _prove_head(method: str, source: str, target: ModelChoice) -> ProvenDrafting:
    text = target.hf_config.get_text_config(decoder=True)
    hidden_size, vocab_size = int(text.hidden_size), int(text.vocab_size)
    folder = Path(source)
    num_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) if folder.is_dir() else 0
    if method == "medusa":
        read_medusa(source, hidden_size=hidden_size, vocab_size=vocab_size)
        return ProvenDrafting(weight_bytes=num_bytes)
    weights = read_eagle(source, hidden_size=hidden_size, vocab_size=vocab_size, num_layers=int(text.num_hidden_layers))
    return ProvenDrafting(weight_bytes=num_bytes, kv_bytes_per_token=bytes_per_token([kv_group(weights.settings)], target.dtype))


def _prove_draft_model(config: EngineConfig, target: ModelChoice) -> ProvenDrafting:
    _, choice = choose_draft_model(config)
    if Path(choice.source).is_dir():
        require_weights(Path(choice.source))
    token_map(target, choice)
    model = without_memory(choice)
    weight_bytes = sum(parameter.numel() for parameter in model.parameters()) * choice.dtype.itemsize
    try:
        per_token = bytes_per_token(kv_groups(probe_layers(model)), choice.dtype)
    except RuntimeError as error:  # a forward pass that looks at values, of which there are none
        logger.warning("the KV of %s is not proven: %s", choice.source, error)
        return ProvenDrafting(weight_bytes=weight_bytes)
    return ProvenDrafting(weight_bytes=weight_bytes, kv_bytes_per_token=per_token)
