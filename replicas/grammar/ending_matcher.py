"""A JSON grammar that comes to its end within a number of tokens, where it can."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from replicas.grammar.json_ending import JsonEnding, StringState
from replicas.grammar.matcher import GrammarMatcher


class EndingMatcher:
    """A `GrammarMatcher`: from token number `ends_from` on, its masks are narrowed to what ends the text soonest. It accepts what `inner`
    accepts."""

    __slots__ = ("_ending", "_ends_from", "_inner", "_string")

    def __init__(self, inner: GrammarMatcher, ending: JsonEnding, ends_from: int) -> None:
        """`inner` has seen no token."""
        self._inner = inner
        self._ending = ending
        self._ends_from = ends_from
        self._string = StringState(ending.tokens)

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        self._inner.fill(row)
        if self._inner.num_tokens >= self._ends_from and self._inner.error is None:
            self._ending.narrow(row, self._string.current, self._inner.num_tokens)

    def accept(self, token_id: int) -> bool:
        if not self._inner.accept(token_id):
            return False
        self._string.accept(token_id)
        return True

    def accept_all(self, token_ids: Sequence[int]) -> int:
        num = self._inner.accept_all(token_ids)
        for token_id in token_ids[:num]:
            self._string.accept(token_id)
        return num

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        self._string.rollback(num_tokens)

    def forced_tokens(self) -> list[int]:
        return self._inner.forced_tokens()

    @property
    def num_tokens(self) -> int:
        return self._inner.num_tokens

    @property
    def may_end(self) -> bool:
        return self._inner.may_end

    @property
    def must_end(self) -> bool:
        return self._inner.must_end

    @property
    def error(self) -> str | None:
        return self._inner.error
