"""The matcher of one answer over llguidance."""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import numpy as np
import numpy.typing as npt

from replicas.grammar.llguidance_text import one_line


class LLGuidanceMatcher:
    """A `GrammarMatcher`. Owns a copy of a compiled grammar and what the answer has done with it.

    EOS never reaches llguidance, which counts it in one state and not in another: it is kept here. A run of forced tokens is computed
    once and then followed, because each of its masks would compute it anew.
    """

    __slots__ = ("_eos_token_ids", "_error", "_has_ended", "_inner", "_num_tokens", "_num_words", "_run", "_run_place")

    def __init__(self, inner: llguidance.LLMatcher, num_words: int, eos_token_ids: frozenset[int]) -> None:
        """`inner` is owned from now on and has seen no token; rows have `num_words` words."""
        self._inner = inner
        self._num_words = num_words
        self._eos_token_ids = eos_token_ids
        self._num_tokens = 0
        self._has_ended = False
        self._error: str | None = None
        self._run: list[int] = []  # forced tokens, of which the first `_run_place` were accepted
        self._run_place = 0
        self._look_at_errors()

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        if row.dtype != np.int32 or row.shape != (self._num_words,) or not row.flags.c_contiguous:
            raise ValueError(f"row must be {self._num_words} words of int32 in one piece, got {row.shape} of {row.dtype}")
        if self._run_place < len(self._run):
            row[:] = 0
            self._allow(row, [self._run[self._run_place]])
        elif self._has_ended:
            row[:] = 0
            self._allow(row, self._eos_token_ids)
        else:
            self._inner.unsafe_compute_mask_ptr(row.ctypes.data, 4 * self._num_words)
            self._look_at_errors()
        if self._error is not None:
            row[:] = -1  # whatever is drawn is thrown away with the request; a row without any token would break the sampler

    def accept(self, token_id: int) -> bool:
        if self._error is not None:
            return False
        if self.accept_all((token_id,)) == 0 and self._error is None:
            self._error = f"token {token_id} is not allowed after {self._num_tokens} tokens"
        return self._error is None

    def accept_all(self, token_ids: Sequence[int]) -> int:
        num = 0
        for token_id in token_ids:
            if not self._try_accept(token_id):
                break
            num += 1
        self._num_tokens += num
        return num

    def _try_accept(self, token_id: int) -> bool:
        if self._error is not None or self._has_ended:
            return False
        if token_id in self._eos_token_ids:
            self._has_ended = self._inner.is_accepting()
            return self._has_ended
        if self._inner.try_consume_tokens([token_id]) == 0:
            self._look_at_errors()
            return False
        self._look_at_errors()
        if self._run_place < len(self._run) and self._run[self._run_place] == token_id:
            self._run_place += 1
        else:  # no forced token, or the forced text in other tokens
            self._run, self._run_place = [], 0
        return self._error is None

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(f"num_tokens must be from 0 to {self._num_tokens}, got {num_tokens}")
        if num_tokens == 0:
            return
        self._num_tokens -= num_tokens
        num_inner = num_tokens - self._has_ended
        self._has_ended = False
        if num_inner:
            self._inner.rollback(num_inner)
            self._run, self._run_place = [], 0
        self._look_at_errors()

    def forced_tokens(self) -> list[int]:
        if self._error is not None or self._has_ended:
            return []
        if self._run_place == len(self._run):
            self._run, self._run_place = self._inner.compute_ff_tokens(), 0
            self._look_at_errors()
        return self._run[self._run_place :]

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def may_end(self) -> bool:
        return self._error is None and (self._has_ended or self._inner.is_accepting())

    @property
    def must_end(self) -> bool:
        return self._error is None and (self._has_ended or self._inner.is_stopped())

    @property
    def error(self) -> str | None:
        return self._error

    def _look_at_errors(self) -> None:
        if self._error is None and self._inner.is_error():
            self._error = one_line(self._inner.get_error()) or "the grammar cannot be followed"

    @staticmethod
    def _allow(row: npt.NDArray[np.int32], token_ids: Sequence[int] | frozenset[int]) -> None:
        for token_id in token_ids:
            row.view(np.uint32)[token_id // 32] |= np.uint32(1 << (token_id % 32))
