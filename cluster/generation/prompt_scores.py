"""The log-probabilities of one prompt: computed once, for all its choices."""

from __future__ import annotations

import asyncio

from cluster.generation.choice_delta import ChoiceDelta
from replicas.request import FinishReason, TokenLogprob


class PromptScores:
    """Owns the prompt log-probabilities that the first choice brings. Its siblings wait for them, and then find the prompt cached."""

    def __init__(self, *, is_all: bool) -> None:
        """`is_all`: no tokens are asked for, so that the log-probabilities are the whole answer."""
        self.is_all = is_all
        self._scores: tuple[TokenLogprob, ...] | None = None
        self._are_there = asyncio.Event()

    @property
    def are_known(self) -> bool:
        return self._scores is not None

    def note(self, scores: tuple[TokenLogprob, ...]) -> None:
        """The first choice has them. A later attempt of it brings the same again."""
        self._scores = scores
        self._are_there.set()

    async def wait_delta(self, index: int) -> ChoiceDelta:
        """The first delta of the sibling `index`, as soon as the log-probabilities are there; its last one when they are all."""
        await self._are_there.wait()
        return ChoiceDelta(index=index, prompt_logprobs=self._scores, finish_reason=FinishReason.LENGTH if self.is_all else None)
