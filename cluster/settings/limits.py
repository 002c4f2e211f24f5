"""Limits on the size of one request."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Bounds that the gateway checks before any work is done for a request."""

    max_body_bytes: int = 4 * 2**20
    """Longer bodies are answered with 413 and not read to the end."""
    max_n: int = 16
    """Choices per prompt."""
    max_prompts: int = 64
    """Prompts per text completion."""
    max_messages: int = 4_096
    """Messages per chat."""
    max_stop_strings: int = 16
    max_stop_chars: int = 1_024
    max_stop_token_ids: int = 64
    max_logit_bias: int = 1_024

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise ValueError(f"{field.name} must be at least 1, got {value}")
