"""What one step computes: a flat run of tokens for each scheduled request."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.scheduling.request_state import RequestState

NO_POSITIONS = range(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledChunk:
    """Tokens `start .. start + num_tokens - 1` of one request, the last of which may be drafts: tokens that nobody has drawn yet."""

    state: RequestState
    start: int
    num_tokens: int
    is_prefill: bool
    logits: range = NO_POSITIONS
    """Positions whose logits are wanted, one run: first those of the prompt that are scored, then those from which tokens are drawn."""
    draft_ids: tuple[int, ...] = ()
    """The drafted tokens at the chunk's end. From the position before each of them, and from the last, a token is drawn."""

    @property
    def scored(self) -> range:
        """Positions whose logits give the log-probability of the prompt token after each."""
        last = len(self.state.request.prompt_ids) - 1
        return range(min(self.logits.start, last), min(self.logits.stop, last))

    @property
    def samples(self) -> bool:
        """Whether the request gets new tokens from this step: with it, every token that it knows is computed."""
        return self.logits.stop >= len(self.state.request.prompt_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStates:
    """Hidden states that a step is asked for, beside its logits."""

    layers: tuple[int, ...]
    """As transformers counts them: i is the residual stream that enters layer i, the number of layers is what leaves the final norm."""
    positions: tuple[range, ...]
    """For each chunk of the plan, positions within it; ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Chunks in the order of the packed step. `published` are the blocks whose content this step promises to write."""

    chunks: tuple[ScheduledChunk, ...] = ()
    published: tuple[int, ...] = ()
    num_preemptions: int = 0
    hidden: HiddenStates | None = None
    """None costs nothing."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks if chunk.is_prefill)

    @property
    def cuts_a_prompt(self) -> bool:
        """Whether a prompt continues in a later step, because this one has no more room for it."""
        return any(chunk.is_prefill and not chunk.samples for chunk in self.chunks)
