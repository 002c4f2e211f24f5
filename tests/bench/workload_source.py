"""The fixed workloads that Manta and its peers are measured on, read from the shared bench folder."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

WORKLOADS_FILE = Path(__file__).resolve().parents[3] / "shared" / "bench" / "workloads.py"

WARM_UP_REPETITION = 10_000
"""A repetition number that no measured run uses, so that its prompts are its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Tokenized prompts and how many tokens to generate for each."""

    prompt_ids: list[list[int]]
    num_outputs: list[int]

    @property
    def num_useful_tokens(self) -> int:
        return sum(self.num_outputs)


def b32_texts(repetition: int) -> list[tuple[str, int]]:
    """The 32 (prompt, max_tokens) of B32. Raises FileNotFoundError when the shared folder is not beside the repository."""
    if not WORKLOADS_FILE.is_file():
        raise FileNotFoundError(f"{WORKLOADS_FILE} is missing: the bench needs the shared folder beside the repository")
    spec = importlib.util.spec_from_file_location("shared_workloads", WORKLOADS_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    items: list[tuple[str, int]] = module.b32(repetition)
    return items


def b32(tokenizer_folder: str, repetition: int, *, num_prompts: int = 32, most_outputs: int = 256) -> Workload:
    """B32 as token ids, cut to its first `num_prompts` prompts and to `most_outputs` tokens each."""
    from transformers import AutoTokenizer

    items = b32_texts(repetition)[:num_prompts]
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    return Workload(
        prompt_ids=[tokenizer(text)["input_ids"] for text, _ in items],
        num_outputs=[min(num, most_outputs) for _, num in items],
    )
