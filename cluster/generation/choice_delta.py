"""One piece of an answer, in the form that all dialects read."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.request import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """New text and tokens of one choice. The last delta of each choice, and only it, has a `finish_reason`."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """One per prompt token after the first, in the first delta of each choice, when the request asks for them."""
    num_cached_tokens: int = 0
    """Prompt tokens that the replica found cached."""
    num_accepted_predicted: int = 0
    num_rejected_predicted: int = 0
    """What became of predicted tokens, see `RequestProgress`."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
