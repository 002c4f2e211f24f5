"""Limits of a scheduler, resolved: no "auto". Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int
    """Most requests that run at once."""
    max_num_batched_tokens: int
    """Token budget of a step; at least `max_num_seqs`, so that every running request can decode."""
    max_model_len: int
    """Most tokens of prompt plus output."""
    max_num_mixed_tokens: int | None = None
    """Token budget of a step in which requests decode, see `PromptBudget`; None takes `max_num_batched_tokens`."""
    max_num_scored_tokens: int = 512
    """Most positions of a step whose logits are kept for `prompt_logprobs`; each is a row of the vocabulary's size."""
    max_urgent_share: float = 0.8
    """See `EngineConfig`; 0: decodes never step aside for more urgent prompts."""
    max_urgent_pause_s: float = 1.0
    eos_token_ids: frozenset[int] = frozenset()
    enable_prefix_caching: bool = True
    weights_version: str = ""

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs})")
