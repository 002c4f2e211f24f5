"""Tokens that a request cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens in and out. A prompt counts once, whatever the number of its choices."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens of the prompts that some choice found cached."""
