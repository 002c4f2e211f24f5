"""How many tokens of prompts one step takes in."""

from __future__ import annotations

from collections.abc import Sequence

from replicas.request_state import RequestState


class PromptBudget:
    """Owns what is left of one step's tokens once its decodes have theirs.

    A prompt beside decodes makes their gap longer, so all such prompts share the smaller budget of a mixed step, of which a block is
    always left for them. A prompt more urgent than every decode does not wait for their sake: it may have all that is left.
    """

    def __init__(self, num_tokens: int, num_mixed_tokens: int | None, block_size: int, decoding: Sequence[RequestState]) -> None:
        """`num_tokens` are left of the step and `num_mixed_tokens` is the budget of a mixed one, decodes included."""
        self._num_left = num_tokens
        self._num_beside_decodes = num_tokens
        self._decode_priority: int | None = None
        if decoding and num_mixed_tokens is not None:
            self._num_beside_decodes = max(num_mixed_tokens - len(decoding), block_size)
            self._decode_priority = min(state.request.priority for state in decoding)

    def left_for(self, state: RequestState) -> int:
        """Tokens, 0 when the step is full for this prompt."""
        if self._decode_priority is None or state.request.priority < self._decode_priority:
            return self._num_left
        return max(0, min(self._num_left, self._num_beside_decodes))

    def take(self, num_tokens: int) -> None:
        self._num_left -= num_tokens
        self._num_beside_decodes -= num_tokens
