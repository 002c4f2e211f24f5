"""Rows of a grammar's mask as sets of tokens, and a compiler for the default model's vocabulary."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from replicas.grammar.llguidance_compiler import LLGuidanceCompiler
from replicas.grammar.matcher import GrammarMatcher

EOS = 2
NUM_ROWS = 49_152


@cache
def default_compiler(model_dir: Path) -> LLGuidanceCompiler:
    """Of the default model, whose chat ends with <|im_end|>."""
    return LLGuidanceCompiler((model_dir / "tokenizer.json").read_text(), NUM_ROWS, {EOS}, max_cached=512)


@cache
def default_backend(model_dir: Path) -> Tokenizer:
    """The independent reference: Hugging Face's own tokenizer."""
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def token_ids(backend: Tokenizer, text: str) -> list[int]:
    return list(backend.encode(text, add_special_tokens=False).ids)


def mask_row(matcher: GrammarMatcher, num_rows: int = NUM_ROWS) -> npt.NDArray[np.int32]:
    row = np.zeros((num_rows + 31) // 32, dtype=np.int32)
    matcher.fill(row)
    return row


def drawn_token(matcher: GrammarMatcher, draw: random.Random) -> int:
    """One of the allowed tokens, EOS only if no other is: the model that least wants to end."""
    allowed = np.unpackbits(mask_row(matcher).view(np.uint8), bitorder="little").nonzero()[0]
    others = allowed[allowed != EOS]
    return int(others[draw.randrange(len(others))]) if len(others) else EOS


def allowed_tokens(matcher: GrammarMatcher, num_rows: int = NUM_ROWS) -> frozenset[int]:
    return frozenset(np.unpackbits(mask_row(matcher, num_rows).view(np.uint8), bitorder="little").nonzero()[0].tolist())


def refused_at(matcher: GrammarMatcher, ids: list[int]) -> int | None:
    """Gives the tokens through mask and matcher, as an engine would. The number of the first one that either forbids; None: all pass."""
    row = np.zeros((NUM_ROWS + 31) // 32, dtype=np.int32)
    for place, token_id in enumerate(ids):
        matcher.fill(row)
        if not row[token_id // 32] >> token_id % 32 & 1 or not matcher.accept(token_id):
            return place
    return None
