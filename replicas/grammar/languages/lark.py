"""A client's Lark grammar: what it must not contain, and its schemas under the server's options."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from replicas.grammar.compiler import GrammarError

_PIECE = re.compile(
    r"""
      (?P<skipped>   (?:\#|//)[^\n]* | [^\S\n]+ )
    | (?P<string>    "(?:\\.|[^"\\\n])*" )
    | (?P<regex>     /(?:\\.|[^/\\])+/ )
    | (?P<directive> %[a-z]+ )
    | (?P<special>   <[^<>\s]+> )
    | (?P<reference> @[\w-]+ )
    | (?P<option>    (?:stop|stop_capture|max_tokens|temperature)\s*= )
    | (?P<name>      \w+ )
    | (?P<other>     .|\n )
    """,
    re.VERBOSE | re.DOTALL,
)
"""Pieces as llguidance's own lexer cuts them: `<` within a string or a pattern is text, elsewhere it names a token."""

_DIRECTIVES = {
    "%llguidance": "options of the compiler (%llguidance) belong to the server",
    "%import": "%import is not supported; write the rule into the grammar",
    "%override": "%override is not supported",
    "%declare": "%declare is not supported",
}
_MAX_SHOWN = 60


def checked_lark(text: str, rewrite: Callable[[dict[str, Any], str], dict[str, Any]]) -> str:
    """The grammar with each schema of a `%json` block replaced by `rewrite(schema, where)`, which may raise GrammarError.

    Raises GrammarError for special tokens, references to other grammars, options of the compiler or of sampling, and JSON blocks that
    cannot be read. Whether the grammar is well-formed is the compiler's business.
    """
    parts: list[str] = []
    position, line = 0, 1
    while position < len(text):
        found = _PIECE.match(text, position)
        assert found is not None, "the last alternative matches any character"
        piece, kind = found.group(), found.lastgroup
        if (reason := _refusal(piece, kind)) is not None:
            raise GrammarError(f"grammar, line {line}: {reason}")
        parts.append(piece)
        position = found.end()
        if kind == "directive" and piece in ("%json", "%regex"):
            where = f"grammar, line {line}"
            block, end = _block(text, position, where)
            parts.append(f" {json.dumps(rewrite(block, where) if piece == '%json' else block)}")
            piece, position = text[found.start() : end], end
        line += piece.count("\n")
    return "".join(parts)


def _refusal(piece: str, kind: str | None) -> str | None:
    shown = piece if len(piece) <= _MAX_SHOWN else f"{piece[:_MAX_SHOWN]}..."
    if kind == "special":
        return f"{shown} names a token of the vocabulary, but a grammar describes text: quote it if the text is meant"
    if kind == "reference":
        return f"{shown} refers to another grammar, but there is only this one"
    if kind == "option":
        return f"{shown.rstrip('= ')} is not supported; use `lazy` or `suffix`, or a field of the request"
    return _DIRECTIVES.get(piece) if kind == "directive" else None


def _block(text: str, position: int, where: str) -> tuple[dict[str, Any], int]:
    """The JSON object at `position`, and the index behind it."""
    start = len(text) - len(text[position:].lstrip())
    try:
        block, end = json.JSONDecoder(parse_constant=_no_constant).raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{where}: what follows %json or %regex must be a JSON object") from error
    if not isinstance(block, dict):
        raise GrammarError(f"{where}: what follows %json or %regex must be a JSON object")
    return block, end


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
