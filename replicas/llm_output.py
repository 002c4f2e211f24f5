"""Results of `LLM`."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.request import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One generated answer."""

    index: int
    """Number of the choice, below `n`."""
    text: str
    """Text without EOS, up to a stop string or stop token (which `include_stop_str_in_output` keeps)."""
    token_ids: list[int]
    """Includes the stop token, or all tokens of the stop string."""
    logprobs: list[TokenLogprob] | None
    """One per token, if requested."""
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string, or the id in `stop_token_ids`, that ended the answer."""
    error: str | None = None
    """Why the request failed, if `finish_reason` is FAILED; text and tokens are those generated before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answers to one prompt."""

    request_id: str
    prompt: str | None
    """Text of the prompt; None if it was given as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None
    """One per prompt token, if requested; None for the first, which has no context."""
    num_cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache (first choice)."""
    outputs: list[CompletionOutput]
    """The `n` choices, in order of index."""
