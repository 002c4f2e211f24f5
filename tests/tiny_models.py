"""Random models of a few thousand weights, one per family, and transformers' output for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama-untied": LlamaConfig(**{**SIZES, "vocab_size": 100, "intermediate_size": 56}, attention_bias=True, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama3-rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=9),
    "gemma2": Gemma2Config(**SIZES, sliding_window=9, attn_logit_softcapping=5.0, final_logit_softcapping=10.0, query_pre_attn_scalar=16),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=9, query_pre_attn_scalar=16),
    "gpt2": GPT2Config(vocab_size=128, n_embd=32, n_layer=3, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2),
    "phi3": Phi3Config(**{key: value for key, value in SIZES.items() if key != "head_dim"}, sliding_window=9),
}
NATIVE_FAMILIES = ("llama", "llama-untied", "llama-tied", "llama3-rope", "qwen2", "qwen3", "mistral")


def save_tiny_model(name: str, folder: Path) -> Path:
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that greedy choices are not near ties
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))  # biases start as zeros, which would hide a wrong one
    model.save_pretrained(folder)
    return folder


def tiny_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 100, (length,), generator=generator).tolist() for length in (1, 5, 23, 40)]


def generated_by_transformers(folder: Path, prompts: list[list[int]], num_output: int) -> list[list[int]]:
    """Greedy tokens in float32, each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return [
        model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)), max_new_tokens=num_output, do_sample=False)[
            0, len(p) :
        ].tolist()
        for p in prompts
    ]
