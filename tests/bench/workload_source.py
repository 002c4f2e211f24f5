"""Reads the fixed workloads for Manta and its peers from the shared bench folder."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from tests.data_paths import PUBLIC_DATA

SHARED_BENCH = PUBLIC_DATA.parent / "bench"

WORKLOADS = ("B32", "SINGLE", "PREFILL")
"""32 prompts of 16 to 256 tokens each; one answer of 128 tokens; one prompt of about 1,500 tokens and one token of output."""

WARM_UP_REPETITION = 10_000
"""A repetition number that no measured run uses, so that its prompts are its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts and how many tokens to generate for each."""

    name: str
    texts: list[str]
    prompt_ids: list[list[int]]
    num_outputs: list[int]

    @property
    def num_tokens(self) -> int:
        """What tokens/s counts: the prompt's tokens of PREFILL, the generated ones of the others."""
        return sum(map(len, self.prompt_ids)) if self.name == "PREFILL" else sum(self.num_outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How much of each workload is used; less than the whole only to try the bench itself, or to warm up."""

    num_prompts: int = 32
    most_outputs: int = 256
    most_characters: int = 1_000_000


def load_workload(name: str, tokenizer_folder: str, repetition: int, cut: Cut) -> Workload:
    """A workload, tokenized. Raises FileNotFoundError when the shared folder is not beside the repository."""
    items = [(text[: cut.most_characters], min(num, cut.most_outputs)) for text, num in _makers()[name](repetition)[: cut.num_prompts]]
    tokenizer = _tokenizer(tokenizer_folder)
    return Workload(
        name=name,
        texts=[text for text, _ in items],
        prompt_ids=[tokenizer(text)["input_ids"] for text, _ in items],
        num_outputs=[num for _, num in items],
    )


@functools.cache
def _tokenizer(folder: str) -> Callable[[str], dict[str, list[int]]]:
    from transformers import AutoTokenizer

    tokenizer: Callable[[str], dict[str, list[int]]] = AutoTokenizer.from_pretrained(folder)
    return tokenizer


@functools.cache
def _makers() -> dict[str, Callable[[int], list[tuple[str, int]]]]:
    """Name -> function of the repetition that gives (prompt, max_tokens) pairs."""
    file = SHARED_BENCH / "workloads.py"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: the bench needs the shared folder beside the repository")
    spec = importlib.util.spec_from_file_location("shared_workloads", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: getattr(module, name.lower()) for name in WORKLOADS}
