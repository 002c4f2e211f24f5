"""Extends the decodes of a plan by drafts. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from replicas.scheduling.block_tables import BlockTables
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import ScheduledChunk, StepPlan


class DraftSlots:
    """Gives drafts the budget and the blocks that nothing else in a step wants. Owns nothing.

    Between `reserve` and `extend` of the same plan a request may hold blocks for drafts that it does not get; `extend` frees them.
    """

    def __init__(self, tables: BlockTables, max_num_tokens: int) -> None:
        """`max_num_tokens` is the token budget of a step in which requests decode."""
        self._tables = tables
        self._max_num_tokens = max_num_tokens

    def rooms(self, plan: StepPlan) -> list[int]:
        """Of each chunk: the most drafts that its request's length allows. 0 for prompts, for a request that ends with its next token, and
        for one with slow masks, since those behind drafts hold up the step.
        Budget and blocks are shared by all and come on top."""
        return [_room(chunk) for chunk in plan.chunks]

    def budget(self, plan: StepPlan) -> int:
        """The most drafts of all requests together."""
        return max(0, self._max_num_tokens - plan.num_tokens)

    def reserve(self, state: RequestState, num_drafts: int) -> int:
        """Allocates slots behind the request's tokens, as far as blocks are free; returns how many drafts have one."""
        return self._tables.room_for_drafts(state, num_drafts)

    def extend(self, plan: StepPlan, drafts: Sequence[Sequence[int]]) -> StepPlan:
        """The plan with `drafts[i]` behind the i-th chunk, cut to room, budget and free blocks."""
        budget = self.budget(plan)
        chunks: list[ScheduledChunk] = []
        for chunk, draft_ids in zip(plan.chunks, drafts, strict=True):
            room = _room(chunk)
            num_drafts = min(len(draft_ids), room, budget)
            if num_drafts > 0:
                num_drafts = self.reserve(chunk.state, num_drafts)
            if room > 0:
                self._tables.trim(chunk.state, num_drafts)
            if num_drafts > 0:
                end = chunk.logits.stop + num_drafts
                logits = range(chunk.logits.start, end)
                chunk = replace(chunk, num_tokens=end - chunk.start, logits=logits, draft_ids=tuple(draft_ids[:num_drafts]))
                budget -= num_drafts
            chunks.append(chunk)
        return replace(plan, chunks=tuple(chunks))


def _room(chunk: ScheduledChunk) -> int:
    state = chunk.state
    if chunk.is_prefill or not chunk.samples or state.request.wants_handoff:
        return 0
    if state.sampling.mask is not None and state.sampling.mask.is_slow:
        return 0
    return max(0, state.max_num_tokens - len(state.token_ids) - 1)
