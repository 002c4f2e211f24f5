"""What `LLM` returns."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.request import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One generated answer."""

    index: int
    """Which of the `n` choices."""
    text: str
    """Without EOS, and up to a stop string or stop token (which `include_stop_str_in_output` keeps)."""
    token_ids: list[int]
    """With the stop token, or all tokens that the stop string took."""
    logprobs: list[TokenLogprob] | None
    """One per token, when asked for."""
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string or the id out of `stop_token_ids` that ended it."""
    error: str | None = None
    """Why it failed, when `finish_reason` is FAILED; text and tokens are what there was until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answers to one prompt."""

    request_id: str
    prompt: str | None
    """Text of the prompt; None when it was given as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None
    """One per prompt token, when asked for; None for the first, which nothing predicts."""
    num_cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache (first choice)."""
    outputs: list[CompletionOutput]
    """In order of index, `n` of them."""
