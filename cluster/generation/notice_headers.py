"""Headers that tell a client what its answer does not do."""

from __future__ import annotations

from urllib.parse import quote

from cluster.generation.prepared_generation import PreparedGeneration

UNSUPPORTED_HEADER = "X-Unsupported-Keywords"
_MAX_CHARS = 1_000
_SAFE = " #:./$[]()*@-_~!'"
"""Printable characters that mean nothing in a header. Everything else in the names of a schema is percent-encoded."""


def notice_headers(generation: PreparedGeneration) -> dict[str, str]:
    """Empty unless keywords of a schema were dropped: then these with their paths, separated by "; " and cut to a header's size."""
    if not generation.dropped_keywords:
        return {}
    texts = [quote(text, safe=_SAFE) for text in generation.dropped_keywords]
    shown = ""
    for place, text in enumerate(texts):
        if len(shown) + len(text) > _MAX_CHARS:
            return {UNSUPPORTED_HEADER: f"{shown}and {len(texts) - place} more"}
        shown += f"{text}; "
    return {UNSUPPORTED_HEADER: shown.removesuffix("; ")}
