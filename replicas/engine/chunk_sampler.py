"""From the logits of a step to the tokens of its chunks. Shapes: N rows of logits, R of which are sampled, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from replicas.request import TokenLogprob
from replicas.sampling.sampler import BAD_LOGITS, Sampler
from replicas.scheduling.step_plan import ScheduledChunk, StepPlan


@dataclass(slots=True, kw_only=True)
class DrawnTokens:
    """New tokens of each chunk that samples, in the plan's order."""

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprob]]
    """One per token, or empty if not requested."""
    errors: dict[int, str] = field(default_factory=dict)
    """index among these chunks -> why no token could be drawn."""


class ChunkSampler:
    """Scores prompts and draws tokens. Of a request it changes the collected log-probabilities of the prompt, and nothing else: tokens
    that a verification appends are gone when it returns.

    Drafts are verified by the ordinary draws: the token at a draft's position is drawn as if the draft did not exist, and the next row
    is used only if the draft equals that token. So drafts change no token, whatever the temperature, penalties or grammar.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def sample(self, plan: StepPlan, logits_NV: torch.Tensor) -> DrawnTokens:
        """`logits_NV` has the rows of all chunks' `logits` positions, in order. Raises torch's errors."""
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
        drawn = self._draw(chunks, logits_NV if len(first_rows) == row else logits_NV[first_rows])
        for index, chunk in enumerate(chunks):
            if chunk.state.prompt_logprobs and any(math.isnan(token.logprob) for token in chunk.state.prompt_logprobs):
                drawn.errors[index] = BAD_LOGITS
        if any(chunk.draft_ids for chunk in chunks):
            self._verify(chunks, first_rows, logits_NV, drawn)
        return drawn

    def _score(self, chunk: ScheduledChunk, logits_NV: torch.Tensor) -> None:
        request, scored, known = chunk.state.request, chunk.scored, chunk.state.prompt_logprobs
        assert known is not None, "only prompts whose log-probabilities are wanted are scored"
        targets = request.prompt_ids[scored.start + 1 : scored.stop + 1]
        known += self._sampler.score(logits_NV, targets, request.params.prompt_logprobs or 0)

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
            if index not in drawn.errors and self._continues(chunk, token_ids)
        ]
        try:
            while open_:
                for index in open_:
                    chunks[index].state.append(drawn.token_ids[index][-1])
                    tried[index] += 1
                more = self._draw([chunks[index] for index in open_], logits_NV[[first_rows[index] + tried[index] for index in open_]])
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
