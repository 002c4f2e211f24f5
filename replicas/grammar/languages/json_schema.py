"""Walking through a JSON schema, and the places in it as JSON pointers (RFC 6901)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias
from urllib.parse import unquote

Path: TypeAlias = tuple[str | int, ...]
"""Keys and indexes from the root to a place."""

_ONE = frozenset(
    [
        "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not", "propertyNames", "then",
        "unevaluatedItems", "unevaluatedProperties",
    ]
)  # fmt: skip
_LIST = frozenset(["allOf", "anyOf", "oneOf", "prefixItems", "items"])
_NAMED = frozenset(["properties", "patternProperties", "dependentSchemas", "dependencies"])
_DEFINITIONS = frozenset(["$defs", "definitions"])


def subschemas(root: Mapping[str, Any], *, with_definitions: bool) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every schema that is an object and that the root reaches, with its path, the root first.

    Each once, following references within the document, wherever they point. `with_definitions`: also definitions that nothing refers to.
    """
    seen: set[int] = set()
    pending: list[tuple[Path, Any]] = [((), root)]
    while pending:
        path, schema = pending.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield path, schema
        found = list(_children(path, schema, with_definitions))
        reference = schema.get("$ref")
        if isinstance(reference, str):
            target = referenced(root, reference)
            if target is not None:
                found.append(target)
        pending.extend(reversed(found))


def _children(path: Path, schema: Mapping[str, Any], with_definitions: bool) -> Iterator[tuple[Path, Any]]:
    for key, value in schema.items():
        if key in _ONE and isinstance(value, dict):
            yield (*path, key), value
        elif key in _LIST and isinstance(value, list):
            yield from (((*path, key, index), item) for index, item in enumerate(value))
        elif (key in _NAMED or (with_definitions and key in _DEFINITIONS)) and isinstance(value, dict):
            yield from (((*path, key, name), item) for name, item in value.items())


def referenced(root: Mapping[str, Any], reference: str) -> tuple[Path, Any] | None:
    """What `#/a/b` refers to, with its path. None for another kind of reference, or one to nothing."""
    if reference == "#":
        return (), root
    if not reference.startswith("#/"):
        return None
    place: Any = root
    path: Path = ()
    for raw in reference[2:].split("/"):
        name = _unescaped(raw)
        if isinstance(place, dict) and name in place:
            place, path = place[name], (*path, name)
        elif isinstance(place, list) and name.isascii() and name.isdigit() and len(name) < 9 and int(name) < len(place):
            place, path = place[int(name)], (*path, int(name))
        else:
            return None
    return path, place


def pointer(path: Path) -> str:
    """`#/properties/a`, as `$ref` writes it; `#` is the root."""
    return "/".join(["#", *(str(part).replace("~", "~0").replace("/", "~1") for part in path)])


def _unescaped(part: str) -> str:
    return unquote(part).replace("~1", "/").replace("~0", "~")
