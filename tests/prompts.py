"""Prompts of several languages and code from the shared data, as chat messages or plain text."""

from __future__ import annotations

import json
from typing import Any

from replicas.text.tokenizer import Tokenizer
from tests.data_paths import SHARED_DATA


def _rows(name: str) -> list[dict[str, Any]]:
    with (SHARED_DATA / "prompts" / name).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def mixed_texts(num_each: int = 5) -> list[str]:
    """`num_each` of English questions, Chinese and Russian reading tasks, and code."""
    xquad = _rows("xquad_shared_prefix.jsonl")
    texts = [row["turns"][0] for row in _rows("mt_bench_question.jsonl")[: 16 * num_each : 16]]
    for lang in ("zh", "ru"):
        rows = [row for row in xquad if row["lang"] == lang][:num_each]
        texts += [f"{row['context'][:240]}\n{row['questions'][0]['question']}" for row in rows]
    return texts + [row["prompt"][:400] for row in _rows("humaneval_prompts.jsonl")[:num_each]]


def mixed_prompts(tokenizer: Tokenizer, num_each: int = 5) -> list[list[int]]:
    """`mixed_texts` as chat prompts of the model."""
    return [tokenizer.chat_prompt_ids([{"role": "user", "content": text}]) for text in mixed_texts(num_each)]
