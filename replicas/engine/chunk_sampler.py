"""From the logits of a step to the tokens of its chunks. Shapes: N rows of logits, R of which are sampled, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from replicas.request import TokenLogprob
from replicas.sampling.masked_draw import BAD_LOGITS
from replicas.sampling.sampler import Sampler
from replicas.sampling.sampling_state import LogitsMask
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import ScheduledChunk, StepPlan


@dataclass(slots=True, kw_only=True)
class DrawnTokens:
    """New tokens of each chunk that samples, in the plan's order."""

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprob]]
    """One per token, or empty if not requested."""
    errors: dict[int, str] = field(default_factory=dict)
    """index among these chunks -> why no token could be drawn."""
    late: list[RequestState] = field(default_factory=list)
    """Requests whose masks are late: no token was drawn. `late_rows` are the rows from which they are drawn later."""
    late_rows: list[int] = field(default_factory=list)


class ChunkSampler:
    """Scores prompts and draws tokens. Of a request it changes the collected log-probabilities of the prompt, and nothing else: tokens
    that a verification appends are gone when it returns.

    Drafts are verified by the ordinary draws: the token at a draft's position is drawn as if the draft did not exist, and the next row
    is used only if the draft equals that token. So drafts change no token, whatever the temperature, penalties or grammar. The argmax of
    rows that nothing edits is taken for all of them at once.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def sample(self, plan: StepPlan, logits_NV: torch.Tensor, late: Collection[LogitsMask] = ()) -> DrawnTokens:
        """`logits_NV` has the rows of all chunks' `logits` positions, in order; requests with a mask in `late` get no token. Raises
        torch's errors."""
        chunks: list[ScheduledChunk] = []
        first_rows: list[int] = []
        row = 0
        for chunk in plan.chunks:
            num_scored = 0
            if chunk.state.prompt_logprobs is not None and (num_scored := len(chunk.scored)):
                self._score(chunk, logits_NV[row : row + num_scored])
            if chunk.samples:
                chunks.append(chunk)
                first_rows.append(row + num_scored)
            row += len(chunk.logits)
        drawn = self._draw_ready(chunks, first_rows, logits_NV, late) if late else self._draw_all(chunks, first_rows, logits_NV)
        for index, chunk in enumerate(chunks):
            if chunk.state.prompt_logprobs and any(math.isnan(token.logprob) for token in chunk.state.prompt_logprobs):
                drawn.errors[index] = BAD_LOGITS
        return drawn

    def _draw_ready(
        self, chunks: Sequence[ScheduledChunk], first_rows: Sequence[int], logits_NV: torch.Tensor, late: Collection[LogitsMask]
    ) -> DrawnTokens:
        is_late = [chunk.state.sampling.mask in late for chunk in chunks]
        ready = [index for index, waits in enumerate(is_late) if not waits]
        found = self._draw_all([chunks[index] for index in ready], [first_rows[index] for index in ready], logits_NV)
        drawn = DrawnTokens(
            token_ids=[[] for _ in chunks],
            logprobs=[[] for _ in chunks],
            errors={ready[place]: error for place, error in found.errors.items()},
            late=[chunk.state for chunk, waits in zip(chunks, is_late, strict=True) if waits],
            late_rows=[row for row, waits in zip(first_rows, is_late, strict=True) if waits],
        )
        for place, index in enumerate(ready):
            drawn.token_ids[index], drawn.logprobs[index] = found.token_ids[place], found.logprobs[place]
        return drawn

    def _draw_all(self, chunks: Sequence[ScheduledChunk], first_rows: Sequence[int], logits_NV: torch.Tensor) -> DrawnTokens:
        drawn = self._draw_first(chunks, first_rows, logits_NV)
        if any(chunk.draft_ids for chunk in chunks):
            self._verify(chunks, first_rows, logits_NV, drawn)
        return drawn

    def _score(self, chunk: ScheduledChunk, logits_NV: torch.Tensor) -> None:
        request, scored, known = chunk.state.request, chunk.scored, chunk.state.prompt_logprobs
        assert known is not None, "only prompts whose log-probabilities are wanted are scored"
        targets = request.prompt_ids[scored.start + 1 : scored.stop + 1]
        known += self._sampler.score(logits_NV, targets, request.params.prompt_logprobs or 0)

    def _draw_first(self, chunks: Sequence[ScheduledChunk], first_rows: Sequence[int], logits_NV: torch.Tensor) -> DrawnTokens:
        """The token of each chunk's first row; for the argmax of the model's logits, which depends on the row alone, also those of the
        rows behind accepted drafts, in the same call."""
        nums = [1 + len(chunk.draft_ids) if chunk.state.sampling.is_plain_greedy else 1 for chunk in chunks]
        rows = [first + place for first, num in zip(first_rows, nums, strict=True) for place in range(num)]
        every = self._draw([chunk for chunk, num in zip(chunks, nums, strict=True) for _ in range(num)], _take(logits_NV, rows))
        if len(rows) == len(chunks):
            return every
        drawn = DrawnTokens(token_ids=[], logprobs=[])
        start = 0
        for index, (chunk, num) in enumerate(zip(chunks, nums, strict=True)):
            token_ids = every.token_ids[start][:]
            if start in every.errors:
                drawn.errors[index] = every.errors[start]
            for row in range(start + 1, start + num):
                if row - 1 in every.errors or row in every.errors or not self._continues(chunk, token_ids):
                    break
                token_ids += every.token_ids[row]
            drawn.token_ids.append(token_ids)
            drawn.logprobs.append(every.logprobs[start])
            start += num
        return drawn

    def _draw(self, chunks: Sequence[ScheduledChunk], logits_RV: torch.Tensor) -> DrawnTokens:
        sampled = self._sampler.sample(logits_RV, [chunk.state.sampling for chunk in chunks])
        return DrawnTokens(
            token_ids=[[token_id] for token_id in sampled.token_ids],
            logprobs=[[] if logprob is None else [logprob] for logprob in sampled.logprobs],
            errors=sampled.errors,
        )

    def _verify(self, chunks: Sequence[ScheduledChunk], first_rows: Sequence[int], logits_NV: torch.Tensor, drawn: DrawnTokens) -> None:
        """Draws further rows, one at a time, for chunks whose newest token equals their next draft. A row that fails behind an accepted
        draft is left out; the next step computes its position again, without drafts."""
        tried = [0] * len(chunks)  # tokens appended to a request only for the draws of further rows
        open_ = [
            index
            for index, (chunk, token_ids) in enumerate(zip(chunks, drawn.token_ids, strict=True))
            if index not in drawn.errors and not chunk.state.sampling.is_plain_greedy and self._continues(chunk, token_ids)
        ]
        try:
            while open_:
                for index in open_:
                    chunks[index].state.append(drawn.token_ids[index][-1])
                    tried[index] += 1
                rows = [first_rows[index] + tried[index] for index in open_]
                more = self._draw([chunks[index] for index in open_], _take(logits_NV, rows))
                still_open: list[int] = []
                for place, index in enumerate(open_):
                    if place in more.errors:
                        continue
                    drawn.token_ids[index] += more.token_ids[place]
                    drawn.logprobs[index] += more.logprobs[place]
                    if self._continues(chunks[index], drawn.token_ids[index]):
                        still_open.append(index)
                open_ = still_open
        finally:
            for index, num_tokens in enumerate(tried):
                chunks[index].state.go_back(num_tokens)

    @staticmethod
    def _continues(chunk: ScheduledChunk, token_ids: Sequence[int]) -> bool:
        """Whether the next row is valid: the last of these tokens equals its draft and does not end the request."""
        place = len(token_ids) - 1
        is_draft = place < len(chunk.draft_ids) and token_ids[place] == chunk.draft_ids[place]
        return is_draft and token_ids[place] not in chunk.state.stop_token_ids


def _take(logits_NV: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """These rows, which ascend; without a copy if they follow each other."""
    if rows and rows[-1] - rows[0] == len(rows) - 1:
        return logits_NV[rows[0] : rows[-1] + 1]
    return logits_NV[list(rows)]
