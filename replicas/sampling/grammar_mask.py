"""The grammar of one request as the mask of its logits. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replicas.grammar.matcher import GrammarMatcher
from replicas.sampling.sampling_state import Words


class GrammarMask:
    """A LogitsMask: owns the matcher of one request, and the words that were computed last."""

    def __init__(self, matcher: GrammarMatcher, vocab_size: int, eos_token_ids: frozenset[int] = frozenset()) -> None:
        """`matcher` has not seen any token; `vocab_size` is the number of logits in a row."""
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
        return () if self.must_end or self.error is not None else self._matcher.forced_tokens()
