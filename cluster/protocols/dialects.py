"""The dialects that are served."""

from __future__ import annotations

from cluster.protocols.dialect import Dialect
from cluster.protocols.openai.chat import ChatDialect
from cluster.protocols.openai.completions import CompletionDialect

DIALECTS: tuple[Dialect, ...] = (ChatDialect(), CompletionDialect())
DEFAULT_DIALECT = DIALECTS[0]
"""Writes the errors of requests that no dialect has been found for."""
_BY_PATH = {dialect.path: dialect for dialect in DIALECTS}


def dialect_of(path: str) -> Dialect:
    """Whose errors a client of `path` understands, for those who answer before a route has been found."""
    return _BY_PATH.get(path, DEFAULT_DIALECT)
