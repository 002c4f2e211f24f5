"""The text behind which an answer's grammar begins, such as `</think>`."""

from __future__ import annotations

from replicas.grammar.token_rows import Row, TokenRows


class BeginMarker:
    """Finds the first end of one text in a stream of tokens (Knuth, Morris and Pratt). A state is the number of bytes of the marker with
    which the text so far ends; `size` is the state at which the grammar begins.

    A token that holds the marker's end and something behind it is never allowed: the grammar begins with a token of its own.
    """

    def __init__(self, marker: str, tokens: TokenRows) -> None:
        self._marker = marker.encode()
        self._tokens = tokens
        self._back = _borders(self._marker)
        self.size = len(self._marker)
        last = self._marker[-1:]
        suspects = [
            token_id for token_id, raw in enumerate(tokens.token_bytes) if last in raw[:-1] and token_id not in tokens.eos_token_ids
        ]
        everything = tokens.where(lambda raw: True)
        self._rows = [everything & ~self._overshooting(suspects, state) for state in range(self.size)]

    def row(self, state: int) -> Row:
        """Tokens allowed in a state below `size`: all but EOS and those that go beyond the marker. Read only."""
        return self._rows[state]

    def next_state(self, state: int, token_id: int) -> int | None:
        """None for a token that is not allowed."""
        if token_id in self._tokens.eos_token_ids or not 0 <= token_id < len(self._tokens.token_bytes):
            return None
        raw = self._tokens.token_bytes[token_id]
        for place, byte in enumerate(raw):
            state = self._step(state, byte)
            if state == self.size:
                return state if place == len(raw) - 1 else None
        return state if raw else None

    def _overshooting(self, suspects: list[int], state: int) -> Row:
        return self._tokens.row_of(token_id for token_id in suspects if self.next_state(state, token_id) is None)

    def _step(self, state: int, byte: int) -> int:
        while state and self._marker[state] != byte:
            state = self._back[state - 1]
        return state + 1 if self._marker[state] == byte else 0


def _borders(marker: bytes) -> list[int]:
    """For each prefix, the length of the longest proper prefix of it that is also its end."""
    borders = [0] * len(marker)
    length = 0
    for place in range(1, len(marker)):
        while length and marker[length] != marker[place]:
            length = borders[length - 1]
        if marker[length] == marker[place]:
            length += 1
        borders[place] = length
    return borders
