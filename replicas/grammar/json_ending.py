"""Brings a JSON text to its end, when few tokens are left for it."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from replicas.grammar.matcher import GrammarMatcher
from replicas.grammar.token_rows import Row, TokenRows

_CLOSING = b"}]"
# First bytes of tokens outside a string, best first: what ends a number or goes on to the next thing that is required, then values that
# take one token, then those that must be closed again.
# Single characters inside a string that may not end yet, best first: an address needs its @, a URI its colon, a pattern often a separator.
_PROGRESS = (b"@", b":", b"-_./ #+")
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
        single = [
            [number for byte in each for number in by_first.get(byte, ()) if len(tokens.token_bytes[number]) == 1] for each in _PROGRESS
        ]
        self._progress = tuple(map(tokens.row_of, single))

    def narrow(self, row: Row, place: StringPlace, num_tokens: int) -> None:
        """Takes from `row`, in place, every token that goes on where another one ends.

        A string that may not end yet is free at every other token, so that neither letters nor separators go on for ever.
        """
        wants_progress = place is StringPlace.INSIDE and num_tokens % 2 == 0
        for preferred in (*self._preferences[place], *(self._progress if wants_progress else ())):
            best = row & preferred
            if best.any():
                row[:] = best
                return


def least_tokens(matcher: GrammarMatcher, num_words: int, most: int) -> int:
    """About how many tokens the shortest answer has, at most `most`: the first allowed one is taken each time. `matcher` has narrowed masks
    and is used up."""
    row = np.zeros(num_words, dtype=np.int32)
    num = 0
    while num < most and not matcher.must_end and matcher.error is None:
        forced = matcher.forced_tokens()[: most - num]
        if not forced:
            matcher.fill(row)
            word = int(row.view(np.uint32).nonzero()[0][0])
            bits = int(row.view(np.uint32)[word])
            forced = [32 * word + (bits & -bits).bit_length() - 1]
        taken = matcher.accept_all(forced)
        if taken == 0:
            break
        num += taken
    return num


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
