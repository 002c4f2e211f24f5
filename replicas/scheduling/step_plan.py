"""The plan of one step: a chunk of consecutive tokens for each scheduled request."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.scheduling.request_state import RequestState

NO_POSITIONS = range(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledChunk:
    """Tokens `start .. start + num_tokens - 1` of one request. The last of them may be drafts: proposed tokens, not drawn yet."""

    state: RequestState
    start: int
    num_tokens: int
    is_prefill: bool
    logits: range = NO_POSITIONS
    """Positions whose logits are wanted: first the scored prompt positions, then those from which tokens are drawn."""
    draft_ids: tuple[int, ...] = ()
    """The drafts at the chunk's end. A token is drawn from the position before each draft, and from the last draft."""

    @property
    def scored(self) -> range:
        """Prompt positions whose logits score the next prompt token."""
        last = len(self.state.request.prompt_ids) - 1
        return range(min(self.logits.start, last), min(self.logits.stop, last))

    @property
    def samples(self) -> bool:
        """Whether the request gets new tokens from this step: after it, all its known tokens are computed."""
        return self.logits.stop >= len(self.state.request.prompt_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStates:
    """Hidden states that a step returns beside its logits."""

    layers: tuple[int, ...]
    """Numbered as in transformers: i is the input of layer i, the number of layers is the output of the final norm."""
    positions: tuple[range, ...]
    """For each chunk of the plan, positions within it; ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Chunks in the order of the packed step. `published` are the blocks that became findable before this step writes them."""

    chunks: tuple[ScheduledChunk, ...] = ()
    published: tuple[int, ...] = ()
    num_preemptions: int = 0
    num_paused: int = 0
    """Decodes that stepped aside for more urgent prompts."""
    hidden: HiddenStates | None = None
    """None: no hidden states are kept."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks if chunk.is_prefill)

    @property
    def cuts_a_prompt(self) -> bool:
        """Whether a prompt continues in a later step because this one has no room for all of it."""
        return any(chunk.is_prefill and not chunk.samples for chunk in self.chunks)
