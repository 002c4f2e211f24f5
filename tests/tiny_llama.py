"""A random llama of a few thousand weights whose vocabulary is bytes, and prompts for it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.prompts import reading_tasks

FIRST_BYTE = 3  # after the special tokens
VOCAB_SIZE = FIRST_BYTE + 256


def save_tiny_llama(folder: Path) -> Path:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that greedy choices are not near ties
    model.save_pretrained(folder)
    return folder


def shared_prompts(num_prompts: int, max_tokens: int = 100) -> list[list[int]]:
    """The beginnings of so many reading tasks in twelve languages: two questions about each text, after the same 61 bytes."""
    tasks = reading_tasks()
    step = max(1, len(tasks) // ((num_prompts + 1) // 2))
    texts = [context.encode()[:60] + b" " + question.encode() for context, questions in tasks[::step] for question in questions]
    prompts = [[FIRST_BYTE + byte for byte in text[:max_tokens]] for text in texts[:num_prompts]]
    assert len({tuple(prompt) for prompt in prompts}) == num_prompts, "there are fewer prompts than were asked for"
    return prompts


def generated_by_transformers(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy continuations in float32, never ending early."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=num_tokens, do_sample=False
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers
