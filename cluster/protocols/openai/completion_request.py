"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from cluster.protocols.openai.generation_fields import GenerationFields, without_surrogates
from cluster.protocols.wire import json_type, shown

# Parameter -> values that ask for nothing. Everything else about them is refused by name.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {"best_of": (1,), "suffix": ("",)}

Prompt = str | tuple[int, ...]
"""Text, or token ids."""


def _prompts(value: object) -> tuple[Prompt, ...]:
    """A string, strings, token ids or arrays of token ids, always as a tuple of prompts."""
    if isinstance(value, str):
        return (without_surrogates(value),)
    if not isinstance(value, list):
        raise ValueError(f"must be a string, an array of strings, or token ids, got {json_type(value)}")
    if not value:
        raise ValueError("must not be empty")
    first = value[0]
    if isinstance(first, str):
        return tuple(_text(item, index) for index, item in enumerate(value))
    if isinstance(first, list):
        return tuple(_token_ids(item, f" at {index}") for index, item in enumerate(value))
    return (_token_ids(value, ""),)


def _text(value: object, index: int) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must hold strings only, got {json_type(value)} at {index}")
    return without_surrogates(value)


def _token_ids(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"must hold arrays of token ids only, got {json_type(value)}{where}")
    if not value:
        raise ValueError(f"must not be empty, got an empty array{where}")
    for item in value:
        if type(item) is not int or item < 0:
            raise ValueError(f"must hold token ids (integers from 0), got {shown(item)}{where}")
    return tuple(value)


class CompletionRequest(GenerationFields):
    """See `CreateCompletionRequest` of OpenAI's description."""

    prompt: Annotated[Any, BeforeValidator(_prompts)]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=5)
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own first tokens to a text prompt; it does by default."""
