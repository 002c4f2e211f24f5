"""Token counts of one HTTP request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens in and out. A prompt counts once, whatever its number of choices."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that some choice found cached."""
    num_accepted_predicted: int = 0
    """Tokens of the answer that the client predicted and that were verified together, over all choices."""
    num_rejected_predicted: int = 0
    """Predicted tokens that were computed in vain."""
