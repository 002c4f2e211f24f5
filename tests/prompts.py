"""Prompts in several languages and code, as plain text or as chat messages of a model."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from replicas.text.tokenizer import Tokenizer
from tests.data_paths import OWN_DATA


@cache
def _rows(name: str) -> tuple[dict[str, Any], ...]:
    with (OWN_DATA / name).open(encoding="utf-8") as file:
        return tuple(json.loads(line) for line in file)


def conversations() -> list[tuple[str, str]]:
    """A user's first and second question."""
    return [tuple(row["turns"]) for row in _rows("conversations.jsonl")]


def reading_tasks(*languages: str) -> list[tuple[str, tuple[str, ...]]]:
    """Texts, and questions about each; of all languages when none is named."""
    rows = _rows("reading.jsonl")
    return [(row["context"], tuple(row["questions"])) for row in rows if not languages or row["lang"] in languages]


def mixed_texts(num_each: int = 5) -> list[str]:
    """`num_each` (at most 14) of English questions, Chinese and Russian reading tasks, and code."""
    groups = [[first for first, _ in conversations()]]
    groups += [[f"{context}\n{questions[0]}" for context, questions in reading_tasks(lang)] for lang in ("zh", "ru")]
    groups.append([row["prompt"] for row in _rows("code.jsonl")])
    assert all(len(group) >= num_each for group in groups), "there are fewer prompts than were asked for"
    return [text for group in groups for text in group[:num_each]]


def mixed_prompts(tokenizer: Tokenizer, num_each: int = 5) -> list[list[int]]:
    """`mixed_texts` as chat prompts of the model."""
    return [tokenizer.chat_prompt_ids([{"role": "user", "content": text}]) for text in mixed_texts(num_each)]


@cache
def tricky_strings() -> tuple[str, ...]:
    """Strings that text handling gets wrong; the first one is empty."""
    return tuple(json.loads((OWN_DATA / "tricky_strings.json").read_text(encoding="utf-8")))
