"""What a client's JSON schema must not contain, whatever the compiler says about it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from replicas.grammar.checking.limits import GrammarLimits, check_regex
from replicas.grammar.compiler import GrammarError
from replicas.grammar.languages.json_schema import Path, pointer, referenced, subschemas
from replicas.grammar.llguidance_text import OPTIONS_KEY


def parse_schema(text: str, limits: GrammarLimits) -> dict[str, Any]:
    """The schema as Python reads it. Raises GrammarError for text that is no JSON object, or nested too deep."""
    try:
        schema = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError as error:
        raise GrammarError(f"the schema must be nested at most {limits.max_depth} deep") from error
    except ValueError as error:
        raise GrammarError(f"the schema must be JSON: {error}") from error
    if not isinstance(schema, dict):
        raise GrammarError("the schema must be a JSON object")
    _check_depth(schema, limits)
    return schema


def check_schema(schema: Mapping[str, Any], limits: GrammarLimits) -> None:
    """Raises GrammarError, with the path, for options of the compiler, texts and patterns over the limits, and too many patterns that
    one string must match together."""
    for path, part in subschemas(dict(schema), with_definitions=True):
        if OPTIONS_KEY in part:
            raise GrammarError(f"{pointer(path)}: {OPTIONS_KEY} sets options of the compiler, which belong to the server")
        pattern = part.get("pattern")
        if isinstance(pattern, str):
            check_regex(pattern, limits, f"{pointer(path)}/pattern")
        for name in part.get("patternProperties") or () if isinstance(part.get("patternProperties"), dict) else ():
            check_regex(name, limits, f"{pointer(path)}/patternProperties: the pattern")
        for where, literal in _literals(part):
            num_bytes = len(literal.encode("utf-8", "surrogatepass"))
            if num_bytes > limits.max_literal_bytes:
                raise GrammarError(f"{pointer(path)}/{where}: a string must be at most {limits.max_literal_bytes} bytes, got {num_bytes}")
        num = num_joined_patterns(schema, part)
        if num > limits.max_joined_patterns:
            raise GrammarError(f"{pointer(path)}: at most {limits.max_joined_patterns} patterns can be joined in one string, got {num}")


def num_joined_patterns(root: Mapping[str, Any], schema: Mapping[str, Any]) -> int:
    """How many patterns `allOf` and `$ref` join with that of `schema` itself, counting each schema once."""
    num = 0
    seen: set[int] = set()
    pending: list[Any] = [schema]
    while pending:
        part = pending.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        num += "pattern" in part
        joined = part.get("allOf")
        pending.extend(joined if isinstance(joined, list) else ())
        if isinstance(part.get("$ref"), str) and (target := referenced(root, part["$ref"])) is not None:
            pending.append(target[1])
    return num


def _literals(part: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Strings that an answer holds as they are, each with the keyword that says so."""
    yield from (("const", text) for text in _strings(part.get("const")))
    yield from (("enum", text) for text in _strings(part.get("enum")))
    for keyword in ("properties", "required"):
        names = part.get(keyword)
        if isinstance(names, dict | list):
            yield from ((keyword, name) for name in names if isinstance(name, str))


def _strings(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            pending.extend(value)
        elif isinstance(value, dict):
            pending.extend(value)
            pending.extend(value.values())


def _check_depth(schema: Any, limits: GrammarLimits) -> None:
    pending: list[tuple[Path, Any]] = [((), schema)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict | list) and len(path) >= limits.max_depth:
            raise GrammarError(f"{pointer(path[:4])}/...: the schema must be nested at most {limits.max_depth} deep")
        if isinstance(value, dict):
            pending.extend(((*path, key), item) for key, item in value.items())
        elif isinstance(value, list):
            pending.extend(((*path, index), item) for index, item in enumerate(value))


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {digits[:20]} is out of range")
    return value
