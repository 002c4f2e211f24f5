"""Where short runs of tokens occurred in a text, and what followed them most often. Free of torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

RUN_LENGTHS = (4, 2)
"""Runs that are looked up, the longest that occurs being used."""
MAX_OCCURRENCES = 16
"""The latest occurrences of a run that vote on what follows."""
MAX_CHAIN = 64
"""Most places tried for them; other runs with the same hash are among these."""
MAX_MATCH = 32
"""Longest match whose length is counted."""
MIN_ESTIMATE = 0.1
"""A draft ends where its estimated probability falls below this."""
END = -1
"""Stands between two texts; it equals no token, so that no match reaches from one into the other."""


class Continuation(NamedTuple):
    token_ids: Sequence[int] = ()
    match_length: int = 0
    score: float = 0.0
    """Estimated number of tokens that will be accepted."""


class Occurrences:
    """Owns the newest `capacity` tokens of a text that grows at its end, and the places of each run of RUN_LENGTHS in it.

    All memory, about 52 bytes a token, is allocated at once. Appending a token takes constant time.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` is rounded up to a power of two."""
        self.capacity = 1 << max(4, (capacity - 1).bit_length())
        self._mask = self.capacity - 1
        self.num_tokens = 0
        self._tokens = array("i", bytes(4 * self.capacity))
        self._latest = [array("q", [-1]) * (2 * self.capacity) for _ in RUN_LENGTHS]  # hash of a run -> position of its last token
        self._earlier = [array("q", [-1]) * self.capacity for _ in RUN_LENGTHS]  # position -> the previous one with the same hash
        self._tail: tuple[int, ...] = ()

    def extend(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            position, place = self.num_tokens, self.num_tokens & self._mask
            self._tokens[place] = token_id
            self._tail = tail = (*self._tail[1 - RUN_LENGTHS[0] :], token_id)
            for length, latest, earlier in zip(RUN_LENGTHS, self._latest, self._earlier, strict=True):
                if len(tail) >= length:
                    slot = self._slot(tail[-length:])
                    earlier[place] = latest[slot]
                    latest[slot] = position
            self.num_tokens = position + 1

    def continuation(self, token_ids: Sequence[int], budget: int) -> Continuation:
        """What followed the end of `token_ids` here, after SuffixDecoding (arXiv 2411.04975, section 3).

        For each length p to which some occurrence matches: the occurrences that match at least p tokens vote for the next token; their
        shares multiply to the estimate of a token; at most p tokens are drafted. The p whose estimates have the largest sum wins, among
        equals the longest.
        """
        found = self._find(token_ids)
        best = Continuation()
        for match_length in sorted({length for length, _ in found}, reverse=True):
            places = [position + 1 for length, position in found if length >= match_length]
            drafted, score = self._follow(places, min(budget, match_length))
            if score > best.score:
                best = Continuation(drafted, match_length, score)
        return best

    def _find(self, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """(match length, position of the last matching token) of the latest occurrences that have a successor, newest first."""
        for length, latest, earlier in zip(RUN_LENGTHS, self._latest, self._earlier, strict=True):
            if len(token_ids) < length:
                continue
            found: list[tuple[int, int]] = []
            position = latest[self._slot(tuple(token_ids[-length:]))]
            for _ in range(MAX_CHAIN):
                if position < max(0, self.num_tokens - self.capacity):
                    break  # overwritten, or none
                if position + 1 < self.num_tokens:
                    match_length = self._match_length(position, token_ids)
                    if match_length >= length and self._tokens[(position + 1) & self._mask] != END:
                        found.append((match_length, position))
                        if len(found) == MAX_OCCURRENCES:
                            break
                position = earlier[position & self._mask]
            if found:
                return found
        return []

    def _match_length(self, position: int, token_ids: Sequence[int]) -> int:
        tokens, mask = self._tokens, self._mask
        most = min(MAX_MATCH, len(token_ids), position + 1, position + 1 - (self.num_tokens - self.capacity))
        length = 0
        while length < most and tokens[(position - length) & mask] == token_ids[-1 - length]:
            length += 1
        return length

    def _follow(self, places: list[int], most: int) -> tuple[list[int], float]:
        drafted: list[int] = []
        estimate, score = 1.0, 0.0
        while places and len(drafted) < most:
            votes: dict[int, list[int]] = {}  # token -> places behind it, newest first
            for place in places:
                if place < self.num_tokens and (token_id := self._tokens[place & self._mask]) != END:
                    votes.setdefault(token_id, []).append(place + 1)
            if not votes:
                break
            token_id, behind = max(votes.items(), key=lambda item: len(item[1]))  # among equals the newest, which came first
            estimate *= len(behind) / len(places)
            if estimate < MIN_ESTIMATE:
                break
            drafted.append(token_id)
            score += estimate
            places = behind
        return drafted, score

    def _slot(self, run: tuple[int, ...]) -> int:
        return hash(run) & (2 * self.capacity - 1)
