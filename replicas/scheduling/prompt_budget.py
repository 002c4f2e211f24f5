"""How many prompt tokens one step computes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import ScheduledChunk


class PromptBudget:
    """Owns the tokens of one step that its decodes leave.

    Prompts lengthen the gap between a stream's tokens, so they are held back: together they get what the smaller budget of a mixed step
    leaves, at least a block. A prompt more urgent than every decode is not held back and may use all that is left. In both cases up to a
    block, at most a quarter of what is left, is kept for the oldest prompt, so that it progresses however many urgent ones arrive.

    While decodes step aside, prompts that are no more urgent than they are get a block together: no decode waits for its equals.
    """

    def __init__(
        self,
        num_tokens: int,
        num_mixed_tokens: int | None,
        block_size: int,
        streaming: Sequence[ScheduledChunk],
        prompts: Sequence[RequestState],
        paused: Collection[RequestState] = (),
    ) -> None:
        """`num_tokens` are left of the step; `num_mixed_tokens` is the budget of a mixed step, decodes included. `streaming` are the
        planned decodes that have emitted a token, so that their gap counts; `prompts` are the running prefills, `paused` the decodes
        that step aside."""
        self._num_left = num_tokens
        self._num_left_held_back = num_tokens
        self._decode_priority: int | None = None
        if streaming and num_mixed_tokens is not None:
            num_decode_tokens = sum(chunk.num_tokens for chunk in streaming)
            self._num_left_held_back = max(num_mixed_tokens - num_decode_tokens, block_size)
            self._decode_priority = min(chunk.state.request.priority for chunk in streaming)
        self._paused_priority = min((state.request.priority for state in paused), default=None)
        self._num_left_behind = block_size  # for prompts that are no more urgent than a paused decode
        self._oldest = min(prompts, key=lambda state: state.arrival_number, default=None)
        self._num_for_oldest = min(block_size, self._num_left // 4, self._num_left_held_back // 4)

    def left_for(self, state: RequestState) -> int:
        """Tokens that this prompt may still use; 0 if the step is full for it."""
        num_left = min(self._num_left, self._num_left_held_back) if self._is_held_back(state) else self._num_left
        if self._is_behind(state):
            num_left = min(num_left, self._num_left_behind)
        return num_left if self._oldest in (None, state) else max(0, num_left - self._num_for_oldest)

    def take(self, state: RequestState, num_tokens: int) -> None:
        self._num_left -= num_tokens
        if self._is_held_back(state):
            self._num_left_held_back -= num_tokens
        if self._is_behind(state):
            self._num_left_behind -= num_tokens
        if state is self._oldest:
            self._oldest = None

    def _is_held_back(self, state: RequestState) -> bool:
        return self._decode_priority is not None and state.request.priority >= self._decode_priority

    def _is_behind(self, state: RequestState) -> bool:
        return self._paused_priority is not None and state.request.priority >= self._paused_priority
