"""A copy of the default model that computes the same function with weights off the 4-bit grid that its file gave them.

The default weights come from a Q4_1 file, so 4-bit rounding and 4-bit twins look better on them than on other models. Here every scale
that cancels out is drawn at random: a norm's weight against the columns behind it, `v_proj` against `o_proj`, `up_proj` against
`down_proj`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def save_off_grid_model(source: Path, folder: Path, seed: int = 0) -> Path:
    """Writes the copy of the llama-like model in `source`, in its dtype."""
    model = AutoModelForCausalLM.from_pretrained(source)
    take_off_grid(model, seed)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@torch.no_grad()
def take_off_grid(model: PreTrainedModel, seed: int = 0) -> None:
    """Rescales the weights of a llama-like model in place, each product in float32."""
    generator = torch.Generator().manual_seed(seed)

    def factors(size: int) -> torch.Tensor:
        """From 1/2 to 2, evenly on a logarithmic scale."""
        return torch.exp2(2 * torch.rand(size, generator=generator) - 1)

    def scale(weight: torch.Tensor, by: torch.Tensor) -> None:
        weight.copy_(weight.float() * by)

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            by = factors(norm.weight.shape[0])
            scale(norm.weight, 1 / by)
            for reader in readers:
                scale(reader.weight, by)
        by = factors(attention.v_proj.weight.shape[0])
        scale(attention.v_proj.weight, by[:, None])
        num_groups = attention.o_proj.weight.shape[1] // len(by)
        heads = by.view(-1, attention.head_dim).repeat_interleave(num_groups, dim=0).flatten()  # each KV head serves a group of heads
        scale(attention.o_proj.weight, 1 / heads)
        by = factors(mlp.up_proj.weight.shape[0])
        scale(mlp.up_proj.weight, by[:, None])
        scale(mlp.down_proj.weight, 1 / by)
