"""Text of clients inside a chat prompt stays text, whatever control tokens it spells. Only the template writes those.

transformers' `sanitize_control_tokens` marks whole tokens in the same way, but lets two texts (a name and a content, a key and the
template's own "<") join into a token, and drops the characters that it marks with from the client's text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_WORDS = frozenset(["role", "type"])
"""Keys of values that templates compare, or build control tokens of (`'<|' + message.role + '|>'`): nothing is put around those."""


class ControlTokens:
    """The tokens that structure a chat, and where client text spells one.

    Client text is marked before the template is rendered, in places that templates do not look at. The marks are random, so no
    client can write one.
    """

    def __init__(self, tokens: Mapping[str, int], unknown_id: int | None = None) -> None:
        """`tokens` maps the text of each control token to its id. Tokens of one character are none: they cannot be taken apart.
        `unknown_id` is the one that any text may have where the vocabulary lacks a character."""
        known = {token: token_id for token, token_id in tokens.items() if len(token) > 1}
        self._counted = {token: token_id for token, token_id in known.items() if token_id != unknown_id}
        self._counted_ids = frozenset(self._counted.values())
        self._prefixes = frozenset(token[:size] for token in known for size in range(1, len(token)))
        self._suffixes = frozenset(token[-size:] for token in known for size in range(1, len(token)))
        self._insides = "\0".join(known)
        self._max_chars = max(map(len, known), default=0)
        self._open, self._close, self._break = marks = _new_mark(), _new_mark(), _new_mark()
        any_token = "|".join(map(re.escape, sorted(known, key=len, reverse=True))) or "(?!)"
        self._token = re.compile(any_token)
        self._token_start = re.compile(f"(?={any_token})")
        self._marked_token = re.compile(f"{self._open}({any_token}){self._close}")
        self._mark = re.compile("|".join(marks))
        self._escaped_marks = {json.dumps(mark)[1:-1]: mark for mark in marks}

    @classmethod
    def of(cls, added_tokens: Mapping[int, Any], template: str, unknown_id: int | None) -> ControlTokens:
        """Of a tokenizer: all special tokens, and those added ones that its chat template mentions. Blank ones are text everywhere."""
        return cls(
            {
                token.content: token_id
                for token_id, token in added_tokens.items()
                if not token.content.isspace() and (token.special or token.content in template)
            },
            unknown_id,
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
        core = text.strip()
        if not core:
            return text
        marked = self._token.sub(rf"{self._open}\g<0>{self._close}", core)
        sizes = range(1, min(len(core), self._max_chars) + 1)
        is_inside = not is_word and len(core) < self._max_chars and core in self._insides
        if is_inside or any(core[:size] in self._suffixes for size in sizes):
            marked = self._break + marked
        if is_inside or any(core[-size:] in self._prefixes for size in sizes):
            marked += self._break
        start = text.index(core)
        return text[:start] + marked + text[start + len(core) :]

    def pieces(self, rendered: str) -> list[str]:
        """A prompt rendered from marked values, without marks, cut so that no piece holds a control token of a client's."""
        for escaped, mark in self._escaped_marks.items():  # by a template's `tojson`
            rendered = rendered.replace(escaped, mark)
        apart = self._marked_token.sub(lambda found: f"{self._break}{self._taken_apart(found[1])}{self._break}", rendered)
        return [piece for piece in self._mark.split(apart) if piece] or [""]

    def _taken_apart(self, token: str) -> str:
        """A control token may hold others."""
        starts = [found.start() + 1 for found in self._token_start.finditer(token)]
        return self._break.join(token[start:end] for start, end in zip([0, *starts], [*starts, len(token)], strict=True))

    def are_only(self, pieces: Sequence[str], token_ids: Iterable[int]) -> bool:
        """Whether the ids have no more control tokens than the pieces spell. Normalization of text could make one."""
        num_written = sum(token in self._counted for piece in pieces for token in self._token.findall(piece))
        return sum(token_id in self._counted_ids for token_id in token_ids) <= num_written


def _new_mark() -> str:
    """Characters for private use, which have no case, no space and no place in any template."""
    return "".join(chr(0xE000 + secrets.randbelow(0x1900)) for _ in range(8))
