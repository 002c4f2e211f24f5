"""The grammar of one request as the mask of its logits. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from typing import NamedTuple

import numpy as np

from replicas.grammar.matcher import GrammarMatcher
from replicas.sampling.sampling_state import Words

LATE_AFTER_S = 0.02
"""How long a step waits for a mask once its model has run, and for what a grammar forces. Both take some tens of microseconds; in a grammar
made to be slow, up to tenths of a second."""


class _Forced(NamedTuple):
    token_ids: list[int]
    seconds: float
    """Of the processor, to find them."""


class GrammarMask:
    """A LogitsMask: owns the matcher of one request, and the words that were computed last."""

    def __init__(
        self,
        matcher: GrammarMatcher,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        helper: Executor | None = None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`matcher` has not seen any token; `vocab_size` is the number of logits in a row. Forced tokens are looked for by `helper`, if
        there is one, so that a step waits for them no longer than LATE_AFTER_S."""
        self.is_slow = False
        self._matcher = matcher
        self._words: Words = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        self._has_words = False  # whether they are those of the current position
        self._eos_token_ids = eos_token_ids
        self._num_eos = 0  # at the end of the text
        self._helper = helper
        self._clock = clock
        self._search: Future[_Forced] | None = None  # of forced tokens, not waited for; until it ends nobody may use the matcher

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
            if self._search is not None:
                self.is_slow = self._search.result().seconds > LATE_AFTER_S  # or else the thread had to wait for a core
                self._search = None
            self._matcher.fill(self._words)
            self._has_words = True
        return self._words

    def forced_tokens(self) -> Sequence[int]:
        """Empty once `is_slow`: then they are drawn, one by one, since their masks leave no other token."""
        if self.is_slow or self.must_end or self.error is not None:
            return ()
        if self._helper is None:
            found = self._find_forced()
            self.is_slow = found.seconds > LATE_AFTER_S
            return found.token_ids
        search = self._helper.submit(self._find_forced)
        wait([search], LATE_AFTER_S)
        if search.done():
            return search.result().token_ids
        self.is_slow, self._search = True, search
        return ()

    def _find_forced(self) -> _Forced:
        start_s = self._clock()
        return _Forced(self._matcher.forced_tokens(), self._clock() - start_s)
