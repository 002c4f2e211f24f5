"""A target whose next token is a fixed permutation of the newest one, and heads that know it: their drafts are all right, unless a hidden
state of another layer or position reaches them.

The residual stream is AMPLITUDE at one coordinate. Each layer's MLP moves it by a permutation of its own; attention adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.drafting_heads import write_head

NUM_IDS, NUM_LAYERS = 48, 4
"""Token ids, and as many coordinates of the residual stream."""
AMPLITUDE, GATE = 3.0, 2.0
CONFIG = LlamaConfig(
    vocab_size=NUM_IDS, hidden_size=NUM_IDS, intermediate_size=NUM_IDS, num_hidden_layers=NUM_LAYERS, num_attention_heads=3,
    num_key_value_heads=3, head_dim=16, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    tie_word_embeddings=False,
)  # fmt: skip


def _permutations() -> list[list[int]]:
    """One for each layer; all of them together are a cycle through all ids, so no text repeats before it has to."""
    generator = torch.Generator().manual_seed(8)
    first = [torch.randperm(NUM_IDS, generator=generator).tolist() for _ in range(NUM_LAYERS - 1)]
    reached = list(range(NUM_IDS))
    for permutation in first:
        reached = [permutation[place] for place in reached]
    last = [0] * NUM_IDS
    for token_id, place in enumerate(reached):
        last[place] = (token_id + 7) % NUM_IDS  # 7 and 48 have no common divisor
    return [*first, last]


PERMUTATIONS = _permutations()


def next_id(token_id: int, num_steps: int = 1) -> int:
    return (token_id + 7 * num_steps) % NUM_IDS


def moved(permutation: Sequence[int]) -> Tensor:
    """The matrix that moves coordinate i to permutation[i]."""
    matrix = torch.zeros(NUM_IDS, NUM_IDS)
    matrix[list(permutation), range(NUM_IDS)] = 1.0
    return matrix


def _mlp(permutation: Sequence[int], amplitude: float) -> dict[str, Tensor]:
    """gate, up and down of an MLP behind a plain norm that replaces the coordinate by its image."""
    through = GATE * NUM_IDS  # silu(GATE * sqrt(n)) * sqrt(n), but for a millionth
    return {
        "gate_proj": GATE * torch.eye(NUM_IDS),
        "up_proj": torch.eye(NUM_IDS),
        "down_proj": amplitude * (moved(permutation) - torch.eye(NUM_IDS)) / through,
    }


def write_target(folder: Path) -> Path:
    model = LlamaForCausalLM(CONFIG)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(AMPLITUDE * torch.eye(NUM_IDS))
        model.lm_head.weight.copy_(torch.eye(NUM_IDS))
        for layer, permutation in zip(model.model.layers, PERMUTATIONS, strict=True):
            layer.self_attn.o_proj.weight.zero_()
            for name, weight in _mlp(permutation, AMPLITUDE).items():
                getattr(layer.mlp, name).weight.copy_(weight)
    model.save_pretrained(folder)
    return folder


def write_medusa(folder: Path, num_heads: int = 3) -> str:
    """Head i moves the final hidden state's coordinate, which is the next token, i + 1 steps on."""
    tensors = {}
    for head in range(num_heads):
        tensors[f"blocks.{head}.layers.0.weight"] = 4 * moved([next_id(token_id, head + 1) for token_id in range(NUM_IDS)])
    config = {"model_type": "medusa", "hidden_size": NUM_IDS, "vocab_size": NUM_IDS, "num_heads": num_heads, "num_hidden_layers": 1}
    return write_head(folder, config, tensors)


def write_eagle(folder: Path, *, is_eagle3: bool, layer_ids: Sequence[int] = (1, 2, 3), read_layer: int = 2) -> str:
    """Its state is the token at t + 1; its MLP moves it one step on. EAGLE-1 reads the final hidden state, EAGLE-3 of `layer_ids` only the
    input of layer `read_layer`, from which it knows the way to the end."""
    half = NUM_IDS // 4
    config: dict[str, Any] = {
        "hidden_size": NUM_IDS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": half, "intermediate_size": NUM_IDS,
        "rms_norm_eps": 1e-6, "num_hidden_layers": 1, "vocab_size": NUM_IDS, "hidden_act": "silu",
    }  # fmt: skip
    width = (2 if is_eagle3 else 1) * NUM_IDS
    prefix = "midlayer" if is_eagle3 else "layers.0"
    generator = torch.Generator().manual_seed(9)
    tensors = {
        f"{prefix}.self_attn.{name}_proj.weight": torch.randn(size, width, generator=generator)
        for name, size in (("q", NUM_IDS), ("k", 2 * half), ("v", 2 * half))
    }
    tensors[f"{prefix}.self_attn.o_proj.weight"] = torch.zeros(NUM_IDS, NUM_IDS)
    tensors[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(NUM_IDS)
    one_on = [next_id(token_id) for token_id in range(NUM_IDS)]
    for name, weight in _mlp(one_on, AMPLITUDE).items():
        tensors[f"{prefix}.mlp.{name}.weight"] = weight
    if not is_eagle3:
        # The final hidden state has sqrt(n) at the next token. The embedding is not read.
        tensors["fc.weight"] = torch.cat([torch.zeros(NUM_IDS, NUM_IDS), AMPLITUDE / NUM_IDS**0.5 * torch.eye(NUM_IDS)], 1)
        return write_head(folder, {**config, "architectures": ["LlamaForCausalLM"], "bias": False}, tensors)
    rest = list(range(NUM_IDS))
    for permutation in PERMUTATIONS[read_layer:]:
        rest = [permutation[place] for place in rest]
    blocks = [moved(rest) if layer == read_layer else torch.zeros(NUM_IDS, NUM_IDS) for layer in layer_ids]
    tensors["fc.weight"] = torch.cat(blocks, 1)
    for name in ("input_layernorm", "hidden_norm"):
        tensors[f"{prefix}.{name}.weight"] = torch.ones(NUM_IDS)
    tensors |= {"norm.weight": torch.ones(NUM_IDS), "lm_head.weight": torch.eye(NUM_IDS)}
    eagle = {"eagle_aux_hidden_state_layer_ids": list(layer_ids), "use_aux_hidden_state": True}
    return write_head(folder, {**config, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": eagle}, tensors)
