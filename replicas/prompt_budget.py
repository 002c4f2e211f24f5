"""How many tokens of prompts one step takes in."""

from __future__ import annotations

from collections.abc import Sequence

from replicas.request_state import RequestState


class PromptBudget:
    """Owns what is left of one step's tokens once its decodes have theirs.

    Prompts make the gap of the decodes beside them longer, so they are held back: together they get what the smaller budget of a mixed
    step leaves, a block at least. A prompt more urgent than every decode is not: it may have all that is left of the step.
    """

    def __init__(self, num_tokens: int, num_mixed_tokens: int | None, block_size: int, decoding: Sequence[RequestState]) -> None:
        """`num_tokens` are left of the step; `num_mixed_tokens` is the budget of a mixed one, its decodes included."""
        self._num_left = num_tokens
        self._num_left_held_back = num_tokens
        self._decode_priority: int | None = None
        if decoding and num_mixed_tokens is not None:
            self._num_left_held_back = max(num_mixed_tokens - len(decoding), block_size)
            self._decode_priority = min(state.request.priority for state in decoding)

    def left_for(self, state: RequestState) -> int:
        """Tokens, 0 when the step is full for this prompt."""
        return min(self._num_left, self._num_left_held_back) if self._is_held_back(state) else self._num_left

    def take(self, state: RequestState, num_tokens: int) -> None:
        self._num_left -= num_tokens
        if self._is_held_back(state):
            self._num_left_held_back -= num_tokens

    def _is_held_back(self, state: RequestState) -> bool:
        return self._decode_priority is not None and state.request.priority >= self._decode_priority
