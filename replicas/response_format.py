"""OpenAI's `response_format` as a grammar. Free of torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replicas.grammar_spec import GrammarKind, GrammarSpec

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_MEMBERS = {
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
    "structural_tag": {"type", "structures", "triggers"},
}
"""Type -> members of the object; `structural_tag` is vLLM's."""
_SCHEMA_MEMBERS = {"name", "description", "schema", "strict"}


class FormatError(ValueError):
    """The value is no response format; `param` is the path of the member that is wrong."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param} {problem}")
        self.param = param
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedGrammar:
    """A grammar as a client asks for it, not checked yet."""

    spec: GrammarSpec
    param: str
    """Path of the grammar in the request, for errors."""
    is_strict: bool = False
    """Whether every keyword of a schema must be enforced, whatever the server's rule for those that cannot be."""


def parse_response_format(value: object, param: str = "response_format") -> AskedGrammar | None:
    """None for type "text". Raises FormatError."""
    if not isinstance(value, Mapping):
        raise FormatError(param, "must be an object")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _MEMBERS:
        raise FormatError(f"{param}.type", f"must be one of {', '.join(_MEMBERS)}")
    if unknown := sorted(value.keys() - _MEMBERS[kind]):
        raise FormatError(f"{param}.{unknown[0]}", f"is not a member of a format of type {kind}")
    if kind == "text":
        return None
    if kind == "json_object":
        return AskedGrammar(spec=GrammarSpec(kind=GrammarKind.JSON_OBJECT), param=param)
    if kind == "structural_tag":
        return AskedGrammar(spec=GrammarSpec(kind=GrammarKind.STRUCTURAL_TAG, text=json_text(dict(value), param)), param=param)
    return _json_schema(value.get("json_schema"), f"{param}.json_schema")


def _json_schema(value: object, param: str) -> AskedGrammar:
    if not isinstance(value, Mapping):
        raise FormatError(param, "must be an object with 'name' and 'schema'")
    if unknown := sorted(value.keys() - _SCHEMA_MEMBERS):
        raise FormatError(f"{param}.{unknown[0]}", f"is not one of {', '.join(sorted(_SCHEMA_MEMBERS))}")
    name = value.get("name")
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise FormatError(f"{param}.name", "must have 1 to 64 letters, digits, underscores or hyphens")
    if not isinstance(value.get("description"), str | None):
        raise FormatError(f"{param}.description", "must be a string")
    strict = value.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise FormatError(f"{param}.strict", "must be true or false")
    schema = value.get("schema")
    if not isinstance(schema, Mapping):
        raise FormatError(f"{param}.schema", "must be an object, a JSON schema")
    spec = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=json_text(schema, f"{param}.schema"))
    return AskedGrammar(spec=spec, param=f"{param}.schema", is_strict=bool(strict))


def json_text(value: Any, param: str) -> str:
    """`value` as JSON, members in their order. Raises FormatError for what JSON, or its text in UTF-8, cannot express."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise FormatError(param, "must be plain JSON: no lone surrogates, no numbers of thousands of digits") from error
    return text
