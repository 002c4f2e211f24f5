"""Tokens as bytes, and sets of tokens as rows of a mask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.int32]


class TokenRows:
    """Owns the bytes of every token of one vocabulary. Rows have a bit for each row of logits, padding included."""

    def __init__(self, token_bytes: Sequence[bytes], num_rows: int, eos_token_ids: frozenset[int]) -> None:
        """`token_bytes[i]` are the bytes of token i, empty for an id without a token."""
        self.token_bytes = token_bytes
        self.eos_token_ids = eos_token_ids
        self._num_rows = num_rows

    @property
    def num_words(self) -> int:
        return (self._num_rows + 31) // 32

    def row_of(self, token_ids: Iterable[int]) -> Row:
        bits = np.zeros(32 * self.num_words, dtype=np.uint8)
        bits[list(token_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def where(self, fits: Callable[[bytes], bool]) -> Row:
        """The row of tokens whose bytes fit; never EOS or an id without a token."""
        return self.row_of(
            token_id for token_id, raw in enumerate(self.token_bytes) if raw and token_id not in self.eos_token_ids and fits(raw)
        )
