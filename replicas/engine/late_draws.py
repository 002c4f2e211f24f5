"""Draws that wait for a mask. Shapes: R rows of logits, V vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from replicas.engine.chunk_sampler import DrawnTokens
from replicas.sampling.sampler import Sampler
from replicas.sampling.sampling_state import LogitsMask
from replicas.scheduling.request_state import RequestState

logger = logging.getLogger(__name__)


class LateDraws:
    """Owns the rows of logits whose masks took too long for their step. A token is the one that the step would have drawn: it comes from
    the same row."""

    def __init__(self, sampler: Sampler, is_ready: Callable[[LogitsMask], bool]) -> None:
        self._sampler = sampler
        self._is_ready = is_ready
        self._rows: dict[RequestState, torch.Tensor] = {}  # request -> its row [V]

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    def put_off(self, states: Sequence[RequestState], rows: Sequence[int], logits_NV: torch.Tensor) -> None:
        """Keeps a copy of each request's row."""
        for state, row in zip(states, rows, strict=True):
            self._rows[state] = logits_NV[row].clone()

    def draw(self) -> tuple[list[RequestState], DrawnTokens]:
        """The tokens of requests whose masks are ready by now. Requests that do not wait any more are forgotten."""
        self._rows = {state: row for state, row in self._rows.items() if state.awaits_draw}
        states = [state for state in self._rows if state.sampling.mask is None or self._is_ready(state.sampling.mask)]
        rows = [self._rows.pop(state) for state in states]
        if not states:
            return [], DrawnTokens(token_ids=[], logprobs=[])
        try:
            sampled = self._sampler.sample(torch.stack(rows), [state.sampling for state in states])
        except (RuntimeError, MemoryError) as error:  # what torch raises for a failed kernel or no memory
            logger.exception("%d late draws failed", len(states))
            reasons = dict.fromkeys(range(len(states)), f"the draw failed: {error}")
            return states, DrawnTokens(token_ids=[[] for _ in states], logprobs=[[] for _ in states], errors=reasons)
        return states, DrawnTokens(
            token_ids=[[token_id] for token_id in sampled.token_ids],
            logprobs=[[] if logprob is None else [logprob] for logprob in sampled.logprobs],
            errors=sampled.errors,
        )
