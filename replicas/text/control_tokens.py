"""Text of clients inside a chat prompt stays text, whatever control tokens it spells. Only the template writes those.

transformers' `sanitize_control_tokens` marks whole tokens in the same way, but lets two texts (a name and a content, a key and the
template's own "<") join into a token, and drops the characters that it marks with from the client's text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

_WORDS = frozenset(["role", "type"])
"""Keys of values that templates compare, or build control tokens of (`'<|' + message.role + '|>'`): nothing is put around those."""
_SEPARATORS = frozenset("\x1c\x1d\x1e\x1f")
"""Of information: blank for Python and Jinja, but nobody writes them for a space."""
_BLANK = "".join(char for char in map(chr, range(0x3001)) if char.isspace())


class SpelledOut(str):
    """A piece of a prompt: a character of a client's that is a control token by itself. Only the tokens of its bytes can write it."""


class ControlTokens:
    """The tokens that structure a chat, and where client text spells one.

    Client text is marked before the template is rendered, in places that templates do not look at. The marks are random, so no
    client can write one.
    """

    def __init__(self, tokens: Mapping[str, int], text_ids: Set[int] = frozenset()) -> None:
        """`tokens` maps the text of each control token to its id. `text_ids` are those that any text may have: of single bytes, and
        of what the vocabulary lacks."""
        chars = {token for token in tokens if len(token) == 1}
        self._counted = {token: token_id for token, token_id in tokens.items() if token_id not in text_ids}
        self._counted_ids = frozenset(self._counted.values())
        self._prefixes = frozenset(token[:size] for token in tokens for size in range(1, len(token)))
        self._suffixes = frozenset(token[-size:] for token in tokens for size in range(1, len(token)))
        self._insides = "\0".join(tokens)
        self._max_chars = max(map(len, tokens), default=0)
        self._blank = "".join(char for char in _BLANK if char not in chars)
        self._open, self._close, self._break, self._spell = marks = _new_marks(4, chars)
        any_token = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"
        self._token = re.compile(any_token)
        self._token_in_any_case = re.compile(any_token, re.IGNORECASE)  # a template may write text in lower case
        self._token_start = re.compile(f"(?={any_token})")
        self._last_token = re.compile(f"(?:{any_token})\\Z")
        longest = 6 * self._max_chars  # a template may have escaped it for JSON
        self._marked_token = re.compile(f"{self._open}((?:(?!{self._open}).){{0,{longest}}}?){self._close}", re.DOTALL)
        self._char = re.compile("|".join(map(re.escape, chars)) or "(?!)")
        self._mark = re.compile("|".join(marks[:3]))
        self._escaped_marks = {json.dumps(mark)[1:-1]: mark for mark in marks[:3]}

    @classmethod
    def of(cls, added_tokens: Mapping[int, Any], template: str, text_ids: Set[int]) -> ControlTokens:
        """Of a tokenizer: all special tokens, and those added ones of more than one character that its chat template mentions. Blank
        ones are text everywhere."""
        return cls(
            {
                token.content: token_id
                for token_id, token in added_tokens.items()
                if (not token.content.isspace() or token.content in _SEPARATORS)
                and (token.special or (len(token.content) > 1 and token.content in template))
            },
            text_ids,
        )

    def mark(self, value: Any, *, is_word: bool = False) -> Any:
        """A copy of `value` (strings in lists and mappings, keys included) with marks around every control token, and where text
        could join with what is beside it into one."""
        if isinstance(value, str):
            return self._mark_text(value, is_word=is_word)
        if isinstance(value, Mapping):
            return {self.mark(key, is_word=True): self.mark(item, is_word=key in _WORDS) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def _mark_text(self, text: str, *, is_word: bool) -> str:
        core = text.strip(self._blank)
        if not core:
            return text
        marked = self._token_in_any_case.sub(rf"{self._open}\g<0>{self._close}", core)
        sizes = range(1, min(len(core), self._max_chars) + 1)
        is_inside = not is_word and len(core) < self._max_chars and core in self._insides
        if is_inside or any(core[:size] in self._suffixes for size in sizes):
            marked = self._break + marked
        if is_inside or any(core[-size:] in self._prefixes for size in sizes):
            marked += self._break
        start = text.index(core)
        return text[:start] + marked + text[start + len(core) :]

    def pieces(self, rendered: str) -> list[str]:
        """A prompt rendered from marked values, without marks, cut so that no piece holds a control token of a client's, but those of
        one character, each in a SpelledOut."""
        for escaped, mark in self._escaped_marks.items():  # by a template's `tojson`
            rendered = rendered.replace(escaped, mark)
        apart = self._marked_token.sub(lambda found: f"{self._break}{self._taken_apart(found[1])}{self._break}", rendered)
        return [self._piece(text) for text in self._mark.split(apart) if text] or [""]

    def _piece(self, text: str) -> str:
        return SpelledOut(text.removeprefix(self._spell)) if text.startswith(self._spell) else text

    def _taken_apart(self, token: str) -> str:
        """A control token may hold others."""
        starts = [found.start() + 1 for found in self._token_start.finditer(token)]
        parts = self._break.join(token[start:end] for start, end in zip([0, *starts], [*starts, len(token)], strict=True))
        return self._char.sub(rf"{self._break}{self._spell}\g<0>{self._break}", parts)

    def is_at_end_of(self, piece: str) -> bool:
        """Whether a piece ends with a control token of the template's."""
        return not isinstance(piece, SpelledOut) and self._last_token.search(piece) is not None

    def are_only(self, pieces: Sequence[str], token_ids: Iterable[int]) -> bool:
        """Whether the ids have no more control tokens than the template wrote. Normalization of text could make one."""
        written = [piece for piece in pieces if not isinstance(piece, SpelledOut)]
        num_written = sum(token in self._counted for piece in written for token in self._token.findall(piece))
        return sum(token_id in self._counted_ids for token_id in token_ids) <= num_written


def _new_marks(count: int, others: Set[str]) -> list[str]:
    """Of characters for private use, which have no case, no space and no place in any template; none of `others`."""
    chars = [char for char in map(chr, range(0xE000, 0xF900)) if char not in others]
    return ["".join(secrets.choice(chars) for _ in range(8)) for _ in range(count)]
