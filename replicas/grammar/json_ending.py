"""Brings a JSON text to its end, when few tokens are left for it."""

from __future__ import annotations

from enum import IntEnum
from functools import cached_property

from replicas.grammar.token_rows import Row, TokenRows

_CLOSING = b"}]"
# First bytes of tokens outside a string, best first: what ends a number or goes on to the next thing that is required, then values that
# take one token, then those that must be closed again.
_PREFERRED = (b",", b":", b"tfn", b"0123456789", b"-", b'"', b"[", b"{")


class StringPlace(IntEnum):
    """Where a JSON text stands."""

    OUTSIDE = 0
    INSIDE = 1
    ESCAPED = 2
    """Inside, behind a backslash."""


class JsonEnding:
    """Which of the allowed tokens end a JSON text soonest. It never forbids the last one that is allowed.

    Without it, a model that repeats itself in a list or a string is cut at `max_tokens`, and its text is no JSON at all. Strings are
    closed as soon as they may, lists and objects too, and values are the shortest of their kind.
    """

    def __init__(self, tokens: TokenRows) -> None:
        self.tokens = tokens

    def narrow(self, row: Row, place: StringPlace) -> None:
        """Takes from `row`, in place, every token that goes on where another one ends."""
        for preferred in self._preferences[place]:
            best = row & preferred
            if best.any():
                row[:] = best
                return

    @cached_property
    def _preferences(self) -> dict[StringPlace, tuple[Row, ...]]:
        """The first row that has an allowed token decides."""
        eos = self.tokens.row_of(self.tokens.eos_token_ids)
        closing = self.tokens.where(lambda raw: all(byte in _CLOSING for byte in raw))
        quote = self.tokens.where(lambda raw: raw[:1] == b'"' and all(byte in _CLOSING for byte in raw[1:]))
        first = [self.tokens.where(lambda raw, firsts=firsts: raw[0] in firsts) for firsts in _PREFERRED]  # type: ignore[misc]
        return {StringPlace.OUTSIDE: (eos, closing, *first), StringPlace.INSIDE: (quote,), StringPlace.ESCAPED: ()}


class StringState:
    """Whether a JSON text so far is inside a string, token by token, with the way back."""

    __slots__ = ("_places", "_tokens")

    def __init__(self, tokens: TokenRows) -> None:
        self._tokens = tokens
        self._places = [StringPlace.OUTSIDE]

    @property
    def current(self) -> StringPlace:
        return self._places[-1]

    def accept(self, token_id: int) -> None:
        place = self._places[-1]
        for byte in b"" if token_id in self._tokens.eos_token_ids else self._tokens.token_bytes[token_id]:
            if place is StringPlace.ESCAPED:
                place = StringPlace.INSIDE
            elif byte == ord('"'):
                place = StringPlace.OUTSIDE if place is StringPlace.INSIDE else StringPlace.INSIDE
            elif byte == ord("\\") and place is StringPlace.INSIDE:
                place = StringPlace.ESCAPED
        self._places.append(place)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self._places[-num_tokens:]
