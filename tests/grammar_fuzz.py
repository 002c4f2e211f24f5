"""Made-up grammars of every kind, sensible and not, from one random source."""

from __future__ import annotations

import json
import random
from typing import Any

from replicas.grammar_spec import GrammarKind, GrammarSpec

_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_FORMATS = ("date", "date-time", "time", "email", "uuid", "ipv4", "uri", "iri", "regex", "nonsense")
_PATTERNS = ("^[a-z]+$", "^a{2,5}$", "[0-9]{3}", "(a|b)*c", "^(?=x)y", r"\bword\b", "(", "[^\\]]", r"^\d{1,3}\.\w+$", "x{1000}", "é+", "")
_UNENFORCED = ("not", "if", "contains", "propertyNames", "dependentRequired", "uniqueItems", "unevaluatedProperties", "$dynamicRef")
_WORDS = ("a", "b_c", "x-y", "", "é", "a/b", "~", "with space", '"', "\\", "<|im_end|>", "$ref", "x-guidance", "\u2028", "😀")
_LARK = (
    "start",
    "a",
    "B",
    ":",
    "|",
    '"x"',
    "/[0-9]+/",
    "(",
    ")",
    "*",
    "+",
    "?",
    "{2,3}",
    "\n",
    "%json {}",
    "<|im_end|>",
    "~",
    "&",
    "%ignore /x/",
)
_REGEX = (
    "a",
    "[a-z]",
    "[^",
    "]",
    "(",
    ")",
    "|",
    "*",
    "+",
    "?",
    "{2}",
    "{1,9}",
    r"\d",
    r"\w",
    ".",
    "^",
    "$",
    "(?i)",
    r"\pL",
    "\\",
    "{",
    "}",
)
_GBNF = ("root", "x", "::=", "|", '"y"', "[a-z]", "(", ")", "*", "+", "\n", "#c", "{3}", ".")


def fuzzed_spec(draw: random.Random) -> GrammarSpec:
    """A grammar that may be right, wrong, unsupported, or no grammar at all. Never one that takes seconds."""
    kind = draw.choice(
        [GrammarKind.JSON_SCHEMA] * 6
        + [GrammarKind.REGEX, GrammarKind.CHOICE, GrammarKind.LARK, GrammarKind.GBNF, GrammarKind.STRUCTURAL_TAG]
    )
    text = {
        GrammarKind.JSON_SCHEMA: lambda: json.dumps(fuzzed_schema(draw)),
        GrammarKind.REGEX: lambda: _pieces(draw, _REGEX, ""),
        GrammarKind.CHOICE: lambda: json.dumps([draw.choice(_WORDS) for _ in range(draw.randint(0, 5))]),
        GrammarKind.LARK: lambda: "start: " + _pieces(draw, _LARK, " "),
        GrammarKind.GBNF: lambda: "root ::= " + _pieces(draw, _GBNF, " "),
        GrammarKind.STRUCTURAL_TAG: lambda: json.dumps(_tags(draw)),
    }[kind]()
    if draw.random() < 0.1:
        text = _damaged(draw, text)
    return GrammarSpec(kind=kind, text=text, is_compact=draw.random() < 0.7, begins_after=draw.choice([None, None, None, "</think>", "é"]))


def fuzzed_schema(draw: random.Random, depth: int = 4) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    if draw.random() < 0.8:
        schema["type"] = draw.choice(_TYPES) if draw.random() < 0.9 else [draw.choice(_TYPES), draw.choice(_TYPES)]
    for _ in range(draw.randint(0, 4)):
        keyword, value = _keyword(draw, depth)
        schema[keyword] = value
    if depth == 4 and draw.random() < 0.3:
        schema["$defs"] = {name: fuzzed_schema(draw, 2) for name in ("a", "b")}
    return schema


def _keyword(draw: random.Random, depth: int) -> tuple[str, Any]:
    simple: list[tuple[str, Any]] = [
        ("minLength", draw.randint(-1, 9)),
        ("maxLength", draw.randint(0, 99)),
        ("pattern", draw.choice(_PATTERNS)),
        ("format", draw.choice(_FORMATS)),
        ("minimum", draw.choice([0, -5, 1.5, 10**12])),
        ("maximum", draw.choice([10, -6, 99.25])),
        ("multipleOf", draw.choice([2, 0.1, 0, 5])),
        ("minItems", draw.choice([0, 2, 10**9])),
        ("maxItems", draw.choice([0, 3, 10**9])),
        ("minProperties", draw.randint(0, 3)),
        ("maxProperties", draw.randint(0, 3)),
        ("required", [draw.choice(_WORDS) for _ in range(draw.randint(0, 3))]),
        ("enum", [draw.choice([*_WORDS, 1, None, True, [], {}]) for _ in range(draw.randint(0, 4))]),
        ("const", draw.choice([*_WORDS, 7, None, {"a": [1]}])),
        ("$ref", draw.choice(["#", "#/$defs/a", "#/$defs/missing", "https://example.com/s", "#anchor"])),
        ("title", draw.choice(_WORDS)),
        ("minimun", 3),
        ("type", draw.choice(["strin", 3, None, []])),
    ]
    if depth == 0 or draw.random() < 0.5:
        return draw.choice(simple)
    nested = [
        ("properties", lambda: {draw.choice(_WORDS): fuzzed_schema(draw, depth - 1) for _ in range(draw.randint(0, 4))}),
        ("patternProperties", lambda: {draw.choice(_PATTERNS): fuzzed_schema(draw, depth - 1) for _ in range(draw.randint(0, 2))}),
        ("additionalProperties", lambda: draw.choice([True, False, fuzzed_schema(draw, depth - 1)])),
        ("items", lambda: draw.choice([fuzzed_schema(draw, depth - 1), False, [fuzzed_schema(draw, depth - 1)]])),
        ("prefixItems", lambda: [fuzzed_schema(draw, depth - 1) for _ in range(draw.randint(0, 2))]),
        (draw.choice(["anyOf", "oneOf", "allOf"]), lambda: [fuzzed_schema(draw, depth - 1) for _ in range(draw.randint(0, 3))]),
        (draw.choice(_UNENFORCED), lambda: fuzzed_schema(draw, depth - 1)),
    ]
    keyword, make = draw.choice(nested)
    return keyword, make()


def _tags(draw: random.Random) -> Any:
    begins = ["<a>", "<b x=", "[call]"]
    structures = [
        {"begin": draw.choice(begins), "schema": fuzzed_schema(draw, 2), "end": draw.choice(_WORDS)} for _ in range(draw.randint(0, 3))
    ]
    return {"structures": structures, "triggers": draw.choice([["<a>", "<b", "["], ["<"], [], "<a>"])}


def _pieces(draw: random.Random, pieces: tuple[str, ...], between: str) -> str:
    return between.join(draw.choice(pieces) for _ in range(draw.randint(0, 12)))


def _damaged(draw: random.Random, text: str) -> str:
    place = draw.randint(0, len(text))
    return text[:place] + draw.choice(["", "\0", "{", '"', "\ud800", "]", "\n", "\\u"]) + text[place + draw.randint(0, 3) :]
