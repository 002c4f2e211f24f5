"""Grammars made to crash, stall or bloat whoever compiles them, and combinations of them."""

from __future__ import annotations

import json
from typing import Any

from replicas.grammar_spec import GrammarKind, GrammarSpec


def _schema(schema: Any) -> GrammarSpec:
    return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=schema if isinstance(schema, str) else json.dumps(schema))


def _spec(kind: GrammarKind, text: str) -> GrammarSpec:
    return GrammarSpec(kind=kind, text=text)


def _chain(num: int, link: str) -> dict[str, Any]:
    """References one behind the other, through the keyword `link`."""
    definitions: dict[str, Any] = {f"d{num}": {"type": "string"}}
    for place in range(num):
        following = {"$ref": f"#/$defs/d{place + 1}"}
        links = {"properties": {"a": following}, "allOf": [following, {}]}
        definitions[f"d{place}"] = {link: links.get(link, following)}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def _doubled(num: int) -> dict[str, Any]:
    """2 ** num strings if it were written out."""
    definitions: dict[str, Any] = {f"d{num}": {"type": "string"}}
    for place in range(num):
        following = {"$ref": f"#/$defs/d{place + 1}"}
        definitions[f"d{place}"] = {"type": "array", "prefixItems": [following, following], "minItems": 2}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def _joined(num: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f"^.*a{place}.{{{place + 5}}}b.*$"} for place in range(num)]


def _many(num: int, part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{place}": part for place in range(num)}}


def _behind_a_choice(schema: Any) -> dict[str, Any]:
    """Nothing of `schema` shows before an answer chooses it."""
    return {"anyOf": [{"const": "one"}, {"type": "array", "prefixItems": [{"const": "x"}, schema], "minItems": 2}]}


_ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}
_TERMINALS = " & ".join(f"/.*a{place}.{{9}}b.*/" for place in range(40))
_CHOICES = [f"choice {place}" for place in range(9_000)]
_QUOTED = " | ".join(json.dumps(choice) for choice in _CHOICES[:6_000])
_RULES = "\n".join(f'a{place}: "x" a{place + 1}' for place in range(5_000))
_GBNF_RULES = "\n".join(f'a{place} ::= "x" a{place + 1}' for place in range(5_000))

BOMBS: dict[str, GrammarSpec] = {
    "nested minItems": _schema({"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}}),
    "minLength": _schema({"type": "string", "minLength": 10**9}),
    "maxLength": _schema({"type": "string", "maxLength": 10**9}),
    "maxItems": _schema({"type": "array", "maxItems": 10**9, "items": {"const": "x"}, "minItems": 10**9}),
    "doubled references": _schema(_doubled(30)),
    "doubled references, dropped": _schema({**_doubled(30), "not": {}}),
    "nested repetition": _spec(GrammarKind.REGEX, "(a{1000}){1000}"),
    "repetition at the limit": _spec(GrammarKind.REGEX, "(a{100}b?){100}"),
    "nested repetition in a pattern": _schema({"type": "string", "pattern": "^(a{1000}){1000}$"}),
    "repetition of classes": _spec(GrammarKind.REGEX, r"(\pL{1,90}\pN?){1,90}"),
    "classes behind a choice": _spec(GrammarKind.REGEX, r"n[a-y]*|q(\pL{1,90}\pN?){1,90}"),
    "ambiguous repetition": _spec(GrammarKind.REGEX, "(x+x+)+y" * 500),
    "enum": _schema({"enum": _CHOICES}),
    "enum beyond the size": _schema({"enum": [f"choice {place}" for place in range(10**5)]}),
    "optional properties": _schema(_many(2_000, {"type": "string"})),
    "optional properties behind a choice": _schema(_behind_a_choice(_many(2_000, {}))),
    "nesting": _schema('{"items":' * 2_000 + "{}" + "}" * 2_000),
    "deep nesting": _schema('{"items":' * 12_000 + "{}" + "}" * 12_000),
    "nesting of lists": _schema('{"enum":' + "[" * 60_000 + "]" * 60_000 + "}"),
    "patterns in one allOf": _schema({"allOf": _joined(40)}),
    "patterns in allOf of a property": _schema({"type": "object", "allOf": [{"properties": {"a": part}} for part in _joined(40)]}),
    "patterns at the limit": _schema({"type": "object", "properties": {f"p{place}": {"allOf": _joined(8)} for place in range(50)}}),
    "patterns and many properties": _schema(
        {"type": "object", "allOf": [{"properties": {"a": part}} for part in _joined(20)], "properties": _many(900, {})["properties"]}
    ),
    "chain through properties": _schema(_chain(1_500, "properties")),
    "chain through items": _schema(_chain(1_900, "items")),
    "chain through additionalProperties": _schema(_chain(1_500, "additionalProperties")),
    "chain of allOf": _schema(
        {"$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {}]} for n in range(1_500)}, "$ref": "#/$defs/d0"}
    ),
    "endless object": _schema({"$defs": {"a": _ENDLESS}, "$ref": "#/$defs/a"}),
    "endless object behind a choice": _schema({"$defs": {"a": _ENDLESS}, "anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}),
    "product of choices": _schema({"allOf": [{"anyOf": [_many(1, {"const": f"{a}{b}"}) for b in range(8)]} for a in range(8)]}),
    "alternatives that overlap": _schema({"oneOf": [{"type": "string", "maxLength": place} for place in range(1_500)]}),
    "alternatives that exclude each other": _schema({"oneOf": [{"const": place} for place in range(3_000)]}),
    "unknown formats": _schema(_many(1_800, {"type": "string", "format": "iri"})),
    "what cannot be enforced": _schema(_many(1_800, {"type": "string", "not": {"const": "x"}})),
    "numbers with many digits": _schema({"type": "number", "minimum": 10**300, "maximum": 10**301, "multipleOf": 1e-300}),
    "integer of many digits": _schema('{"type": "integer", "minimum": ' + "9" * 4_000 + "}"),
    "long constant": _schema({"const": "x" * 100_000}),
    "constants side by side": _schema({"type": "array", "prefixItems": [{"const": "y" * 4_000}] * 30, "minItems": 30}),
    "choices": _spec(GrammarKind.CHOICE, json.dumps(_CHOICES)),
    "choices as rules": _spec(GrammarKind.LARK, f"start: {_QUOTED}"),
    "choices as a terminal": _spec(GrammarKind.LARK, f"start: T\nT: {_QUOTED}"),
    "joined terminals": _spec(GrammarKind.LARK, f"start: T\nT: {_TERMINALS}"),
    "rejected terminals": _spec(GrammarKind.LARK, "start: T\nT: " + " & ".join(f"~/(.*)a{place}.{{9}}(.*)/" for place in range(40))),
    "chain of rules": _spec(GrammarKind.LARK, f'start: a0\n{_RULES}\na5000: "x"'),
    "endless rule": _spec(GrammarKind.LARK, 'start: "a" start'),
    "ambiguous rules": _spec(GrammarKind.LARK, 'start: s\ns: s s s | s s | "a" | ""'),
    "parentheses in Lark": _spec(GrammarKind.LARK, "start: " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "parentheses in a regex": _spec(GrammarKind.REGEX, "(" * 4_000 + "a" + ")" * 4_000),
    "chain of rules in GBNF": _spec(GrammarKind.GBNF, f'root ::= a0\n{_GBNF_RULES}\na5000 ::= "x"'),
    "parentheses in GBNF": _spec(GrammarKind.GBNF, "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "many tags": _spec(
        GrammarKind.STRUCTURAL_TAG,
        json.dumps(
            {
                "structures": [{"begin": f"<t{n}>", "schema": _many(50, {"type": "string"}), "end": "x"} for n in range(60)],
                "triggers": ["<t"],
            }
        ),
    ),
}
