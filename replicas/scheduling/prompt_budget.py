"""How many tokens of prompts one step takes in."""

from __future__ import annotations

from collections.abc import Sequence

from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import ScheduledChunk


class PromptBudget:
    """Owns what is left of one step's tokens once its decodes have theirs.

    Prompts make the gap of the decodes beside them longer, so they are held back: together they get what the smaller budget of a mixed
    step leaves, a block at least. A prompt more urgent than every decode is not: it may have all that is left of the step. Of either, up
    to a block and a quarter is kept for the oldest prompt, which so goes on however many more urgent ones come.
    """

    def __init__(
        self,
        num_tokens: int,
        num_mixed_tokens: int | None,
        block_size: int,
        streaming: Sequence[ScheduledChunk],
        prompts: Sequence[RequestState],
    ) -> None:
        """`num_tokens` are left of the step; `num_mixed_tokens` is the budget of a mixed one, its decodes included. `streaming` are the
        decodes planned already that have a gap to keep, `prompts` the requests that run already."""
        self._num_left = num_tokens
        self._num_left_held_back = num_tokens
        self._decode_priority: int | None = None
        if streaming and num_mixed_tokens is not None:
            num_decode_tokens = sum(chunk.num_tokens for chunk in streaming)
            self._num_left_held_back = max(num_mixed_tokens - num_decode_tokens, block_size)
            self._decode_priority = min(chunk.state.request.priority for chunk in streaming)
        self._oldest = min(prompts, key=lambda state: state.arrival_number, default=None)
        self._num_for_oldest = min(block_size, self._num_left // 4, self._num_left_held_back // 4)

    def left_for(self, state: RequestState) -> int:
        """Tokens, 0 when the step is full for this prompt."""
        num_left = min(self._num_left, self._num_left_held_back) if self._is_held_back(state) else self._num_left
        return num_left if self._oldest in (None, state) else max(0, num_left - self._num_for_oldest)

    def take(self, state: RequestState, num_tokens: int) -> None:
        self._num_left -= num_tokens
        if self._is_held_back(state):
            self._num_left_held_back -= num_tokens
        if state is self._oldest:
            self._oldest = None

    def _is_held_back(self, state: RequestState) -> bool:
        return self._decode_priority is not None and state.request.priority >= self._decode_priority
