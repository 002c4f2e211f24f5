"""Random EAGLE heads with the tensors and configurations of each layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.unit.drafting_heads import random_tensors

W, V, LAYERS = 16, 40, 6
"""The target's hidden size, vocabulary and layers."""
LAYER = {
    "hidden_size": W, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "rms_norm_eps": 1e-5,
    "rope_theta": 500.0, "hidden_act": "silu", "num_hidden_layers": 1, "vocab_size": V, "max_position_embeddings": 128,
    "model_type": "llama",
}  # fmt: skip
EAGLE1 = {**LAYER, "architectures": ["LlamaForCausalLM"], "bias": True}
EAGLE3 = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 12}
IDS = (3, 4, 9, 11, 15, 20, 21, 26, 30, 33, 34, 39)
"""The token ids that a head of EAGLE3 drafts."""


def _layer_shapes(prefix: str, size: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": (32, width), f"{prefix}.self_attn.k_proj.weight": (16, width),
        f"{prefix}.self_attn.v_proj.weight": (16, width), f"{prefix}.self_attn.o_proj.weight": (size, 32),
        f"{prefix}.mlp.gate_proj.weight": (24, size), f"{prefix}.mlp.up_proj.weight": (24, size),
        f"{prefix}.mlp.down_proj.weight": (size, 24), f"{prefix}.post_attention_layernorm.weight": (size,),
    }  # fmt: skip


def eagle1_tensors(*, has_bias: bool = True) -> dict[str, Tensor]:
    shapes = {"embed_tokens.weight": (V, W), "fc.weight": (W, 2 * W), **_layer_shapes("layers.0", W, W)}
    return random_tensors({**shapes, "fc.bias": (W,)} if has_bias else shapes, seed=11)


def eagle3_tensors(
    prefix: str = "midlayer", *, size: int = W, ids: tuple[int, ...] = IDS, has_embedding: bool = False, num_states: int = 3
) -> dict[str, Tensor]:
    shapes = {
        "fc.weight": (size, num_states * W), **_layer_shapes(prefix, size, 2 * size), f"{prefix}.input_layernorm.weight": (size,),
        f"{prefix}.hidden_norm.weight": (size,), "norm.weight": (size,), "lm_head.weight": (len(ids), size),
    }  # fmt: skip
    if has_embedding:
        shapes["embed_tokens.weight"] = (V, size)
    tensors = random_tensors(shapes, seed=12)
    is_drafted = torch.zeros(V, dtype=torch.bool)
    is_drafted[list(ids)] = True
    return {**tensors, "d2t": torch.tensor(ids) - torch.arange(len(ids)), "t2d": is_drafted}


def speculators_config(**options: Any) -> dict[str, Any]:
    """What speculators 0.9 writes."""
    return {
        "speculators_model_type": "eagle3", "speculators_version": "0.9.0", "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": 12, "norm_before_residual": False, "norm_output": False, "norm_before_fc": False, "fc_norm": False,
        "target_hidden_size": W, "eagle_aux_hidden_state_layer_ids": [1, 3, 5], "transformer_layer_config": LAYER,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]},
        },
        **options,
    }  # fmt: skip
