"""A grammar that begins behind a marker."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from replicas.grammar.begin_marker import BeginMarker
from replicas.grammar.matcher import GrammarMatcher


class MarkedMatcher:
    """A `GrammarMatcher` whose text is free up to the end of a marker and follows `inner` from there. It cannot end before."""

    __slots__ = ("_error", "_inner", "_make_inner", "_marker", "_states")

    def __init__(self, marker: BeginMarker, make_inner: Callable[[int], GrammarMatcher]) -> None:
        """`make_inner` gets the number of tokens up to the marker's end, and makes a matcher for those behind it."""
        self._marker = marker
        self._make_inner = make_inner
        self._states = [0]  # of the marker, before and after each free token
        self._inner: GrammarMatcher | None = None  # from the marker's end on
        self._error: str | None = None

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        if self._inner is not None:
            self._inner.fill(row)
        elif self._error is not None:
            row[:] = -1
        else:
            row[:] = self._marker.row(self._states[-1])

    def accept(self, token_id: int) -> bool:
        if self._inner is not None:
            return self._inner.accept(token_id)
        if self._error is None and self.accept_all((token_id,)) == 0:
            self._error = f"token {token_id} is not allowed after {self.num_tokens} tokens"
        return self._error is None

    def accept_all(self, token_ids: Sequence[int]) -> int:
        for place, token_id in enumerate(token_ids):
            if self._inner is not None:
                return place + self._inner.accept_all(token_ids[place:])
            state = None if self._error is not None else self._marker.next_state(self._states[-1], token_id)
            if state is None:
                return place
            self._states.append(state)
            if state == self._marker.size:
                self._inner = self._make_inner(len(self._states) - 1)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"num_tokens must be from 0 to {self.num_tokens}, got {num_tokens}")
        if self._inner is not None:
            num_inner = min(num_tokens, self._inner.num_tokens)
            self._inner.rollback(num_inner)
            num_tokens -= num_inner
        if num_tokens:
            del self._states[-num_tokens:]
            self._inner = None

    def forced_tokens(self) -> list[int]:
        return [] if self._inner is None else self._inner.forced_tokens()

    @property
    def num_tokens(self) -> int:
        return len(self._states) - 1 + (0 if self._inner is None else self._inner.num_tokens)

    @property
    def may_end(self) -> bool:
        return self._inner is not None and self._inner.may_end

    @property
    def must_end(self) -> bool:
        return self._inner is not None and self._inner.must_end

    @property
    def error(self) -> str | None:
        return self._error if self._inner is None else self._inner.error
