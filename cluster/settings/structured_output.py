"""Settings of structured output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Unsupported = Literal["refuse", "warn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputConfig:
    """How one model's answers follow grammars."""

    unsupported: Unsupported = "refuse"
    """Keywords of a JSON schema that cannot be enforced. refuse: 400 naming the first. warn: these keywords alone are dropped, and the
    answer's header X-Unsupported-Keywords names them. A request may choose for itself; one with `strict: true` is always refused."""
    begins_after: str | None = None
    """For a model that thinks first: text such as </think> behind which every grammar begins. None: it holds from the first token."""

    def __post_init__(self) -> None:
        if self.unsupported not in get_args(Unsupported):
            raise ValueError(f"unsupported must be {' or '.join(get_args(Unsupported))}, got {self.unsupported!r}")
        if self.begins_after is not None and not 1 <= len(self.begins_after) <= 64:
            raise ValueError("begins_after must have 1 to 64 characters, or be left out")
