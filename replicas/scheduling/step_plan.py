"""What one step computes: a flat run of tokens for each scheduled request."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.scheduling.request_state import RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledChunk:
    """Tokens `start .. start + num_tokens - 1` of one request; `samples` when the last of them asks for a next token."""

    state: RequestState
    start: int
    num_tokens: int
    samples: bool
    is_prefill: bool
    scored: range = range(0)
    """Positions whose logits give the log-probability of the prompt token after each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Chunks in the order of the packed step. `published` are the blocks whose content this step promises to write."""

    chunks: tuple[ScheduledChunk, ...] = ()
    published: tuple[int, ...] = ()
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks if chunk.is_prefill)

    @property
    def cuts_a_prompt(self) -> bool:
        """Whether a prompt goes on in a later step, because this one has no more room for it."""
        return any(chunk.is_prefill and not chunk.samples for chunk in self.chunks)
