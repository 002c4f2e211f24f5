"""The grammar of one request as the mask of its logits. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from replicas.grammar.matcher import GrammarMatcher
from replicas.sampling.sampling_state import Words

SLOW_S = 0.02
"""Processor time of a mask, or of a search for forced tokens, that makes a request slow. Both usually take some tens of microseconds."""


class GrammarMask:
    """A LogitsMask: owns the matcher of one request, and the words that were computed last."""

    def __init__(
        self,
        matcher: GrammarMatcher,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        *,
        forces: bool = True,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`matcher` has not seen any token; `vocab_size` is the number of logits in a row. Without `forces` no forced tokens are looked
        for: they are drawn, since their masks leave no other token. `clock` counts processor time of the calling thread."""
        self.is_slow = False
        self._forces = forces
        self._clock = clock
        self._matcher = matcher
        self._words: Words = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        self._has_words = False  # whether they are those of the current position
        self._eos_token_ids = eos_token_ids
        self._num_eos = 0  # at the end of the text

    @property
    def must_end(self) -> bool:
        return self._num_eos > 0 or self._matcher.must_end

    @property
    def error(self) -> str | None:
        return self._matcher.error

    def advance(self, token_id: int) -> None:
        self._has_words = False
        if self._matcher.error is None:
            self._matcher.accept(token_id)
        self._num_eos = self._num_eos + 1 if token_id in self._eos_token_ids else 0

    def rollback(self, num_tokens: int) -> None:
        self._has_words = False
        self._num_eos = max(0, self._num_eos - num_tokens)
        if self._matcher.error is None:
            self._matcher.rollback(num_tokens)

    def words(self) -> Words:
        if not self._has_words:
            self._matcher.fill(self._words)
            self._has_words = True
        return self._words

    def forced_tokens(self) -> Sequence[int]:
        if not self._forces or self.is_slow or self.must_end or self.error is not None:
            return ()
        start_s = self._clock()
        found = self._matcher.forced_tokens()
        self.is_slow = self._clock() - start_s >= SLOW_S
        return found
