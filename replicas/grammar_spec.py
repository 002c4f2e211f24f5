"""A grammar that an answer must follow, as it travels with its request. Free of torch and of any grammar library."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum


class GrammarKind(StrEnum):
    """Languages in which a grammar can be written."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    """Any JSON object; `text` is empty."""
    REGEX = "regex"
    """The whole answer matches. Rust's syntax: no look-around, no back-references."""
    CHOICE = "choice"
    """The answer is one of a JSON array of strings."""
    LARK = "lark"
    """Lark as llguidance reads it; the rule `start` is the whole answer."""
    GBNF = "gbnf"
    """Grammars of llama.cpp; the rule `root` is the whole answer."""
    STRUCTURAL_TAG = "structural_tag"
    """Free text in which each trigger must begin a tag whose content follows a schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """One grammar, complete in itself: any process can compile it again, and gets the same masks."""

    kind: GrammarKind
    text: str = ""
    """JSON text of a schema, of choices or of structural tags; otherwise the pattern or the grammar itself."""
    is_compact: bool = True
    """Whether JSON has no whitespace outside strings. False allows a bounded run of it wherever JSON does."""
    begins_after: str | None = None
    """Text such as `</think>` that must come first; the answer is free until then. None: the grammar holds from the first token."""

    def __post_init__(self) -> None:
        if self.begins_after == "":
            raise ValueError("begins_after must be a non-empty text, or None")

    @property
    def key(self) -> str:
        """SHA-256 of all fields, as hexadecimal digits: equal keys mean equal masks."""
        digest = hashlib.sha256()
        for field in (self.kind.value, self.text, str(self.is_compact), "" if self.begins_after is None else self.begins_after):
            raw = field.encode("utf-8", "surrogatepass")
            digest.update(len(raw).to_bytes(8, "little") + raw)
        return digest.hexdigest()
