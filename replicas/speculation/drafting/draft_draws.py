"""Draws drafts as the target draws its tokens. Shapes: R rows (requests that draft), C token ids that a head knows, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from replicas.sampling.sampler import Sampler
from replicas.scheduling.request_state import RequestState


class DraftDraws:
    """The drafts of several requests while they are made.

    A draft is accepted if it equals the target's draw, so it is drawn in the same way: the same filters, and the same uniform number
    at its position. At temperature 0 that is the most probable token; above it, a good drafter is accepted far more often than with
    its most probable token.
    """

    def __init__(self, sampler: Sampler, states: Sequence[RequestState], budgets: Sequence[int]) -> None:
        self._sampler, self._states, self._budgets = sampler, states, budgets
        self.token_ids: list[list[int]] = [[] for _ in states]
        self.open: list[int] = list(range(len(states)))
        """Indices of the requests that take another draft."""

    @classmethod
    @contextmanager
    def of(cls, sampler: Sampler, states: Sequence[RequestState], budgets: Sequence[int]) -> Iterator[DraftDraws]:
        """While this is open the drafts stand in `state.token_ids`, so that penalties and grammar see them; then they are gone again."""
        draws = cls(sampler, states, budgets)
        try:
            yield draws
        finally:
            for state, token_ids in zip(states, draws.token_ids, strict=True):
                state.go_back(len(token_ids))

    def draw(self, logits_RC: Tensor, token_ids_C: Tensor | None = None) -> list[int]:
        """One draft for each open request, from its row of logits in the order of `open`; returns the drafts of those that are open
        afterwards. `token_ids_C` are the ids of the columns, ascending; None if they are all of the vocabulary."""
        states = [self._states[index] for index in self.open]
        failed: set[int] = set()
        if token_ids_C is not None and all(state.sampling.is_plain_greedy for state in states):
            drawn = token_ids_C[logits_RC.argmax(-1)].tolist()
        else:
            sampled = self._sampler.sample(_widened(logits_RC, token_ids_C, self._sampler.vocab_size), [state.sampling for state in states])
            drawn, failed = sampled.token_ids, set(sampled.errors)
        for row, (index, token_id) in enumerate(zip(list(self.open), drawn, strict=True)):
            if row in failed:
                self.open.remove(index)
                continue
            self._states[index].append(token_id)
            self.token_ids[index].append(token_id)
            if len(self.token_ids[index]) >= self._budgets[index] or token_id in self._states[index].stop_token_ids:
                self.open.remove(index)
        return [self.token_ids[index][-1] for index in self.open]


def _widened(logits_RC: Tensor, token_ids_C: Tensor | None, vocab_size: int) -> Tensor:
    """Logits [R, V], minus infinity where the head knows no token."""
    if token_ids_C is None:
        return logits_RC
    logits_RV = torch.full((logits_RC.shape[0], vocab_size), -torch.inf, dtype=torch.float32, device=logits_RC.device)
    logits_RV[:, token_ids_C] = logits_RC.float()
    return logits_RV
