"""The log-probabilities of one prompt, computed once for all its choices."""

from __future__ import annotations

import asyncio

from cluster.generation.choice_delta import ChoiceDelta
from replicas.request import FinishReason, TokenLogprob


class PromptScores:
    """Owns the prompt log-probabilities that the first choice computes. The other choices wait for them, and then find the prompt
    cached."""

    def __init__(self, *, is_all: bool) -> None:
        """`is_all`: no tokens are requested, so the log-probabilities are the whole answer."""
        self.is_all = is_all
        self._scores: tuple[TokenLogprob, ...] | None = None
        self._are_there = asyncio.Event()

    @property
    def are_known(self) -> bool:
        return self._scores is not None

    def note(self, scores: tuple[TokenLogprob, ...]) -> None:
        """Stores the log-probabilities from the first choice. A later attempt of it gives the same ones again."""
        self._scores = scores
        self._are_there.set()

    async def wait_delta(self, index: int) -> ChoiceDelta:
        """Waits for the log-probabilities and returns the first delta of choice `index`, which is its last one with `is_all`."""
        await self._are_there.wait()
        return ChoiceDelta(index=index, prompt_logprobs=self._scores, finish_reason=FinishReason.LENGTH if self.is_all else None)
