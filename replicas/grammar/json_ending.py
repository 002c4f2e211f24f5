"""Brings a JSON text to its end, when few tokens are left for it."""

from __future__ import annotations

from enum import IntEnum

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
        """Goes through the vocabulary, which takes some hundredths of a second for 100,000 tokens."""
        self.tokens = tokens
        by_first: dict[int, list[int]] = {}  # first byte -> tokens
        for token_id, raw in enumerate(tokens.token_bytes):
            if raw and token_id not in tokens.eos_token_ids:
                by_first.setdefault(raw[0], []).append(token_id)
        closing = [number for byte in _CLOSING for number in by_first.get(byte, ()) if not tokens.token_bytes[number].strip(_CLOSING)]
        quotes = [number for number in by_first.get(ord('"'), ()) if not tokens.token_bytes[number][1:].strip(_CLOSING)]
        preferred = [[number for byte in firsts for number in by_first.get(byte, ())] for firsts in _PREFERRED]
        # For each place, the first row that has an allowed token decides.
        self._preferences: dict[StringPlace, tuple[Row, ...]] = {
            StringPlace.OUTSIDE: tuple(map(tokens.row_of, (tokens.eos_token_ids, closing, *preferred))),
            StringPlace.INSIDE: (tokens.row_of(quotes),),
            StringPlace.ESCAPED: (),
        }

    def narrow(self, row: Row, place: StringPlace) -> None:
        """Takes from `row`, in place, every token that goes on where another one ends."""
        for preferred in self._preferences[place]:
            best = row & preferred
            if best.any():
                row[:] = best
                return


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
