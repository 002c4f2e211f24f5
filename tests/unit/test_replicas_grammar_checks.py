"""What clients may ask for; expected paths and sizes are read off the schemas by hand."""

from __future__ import annotations

import json
import random
from collections import Counter

import jsonschema
import pytest

from replicas.grammar.checking.checks import GrammarChecker
from replicas.grammar.checking.limits import GrammarLimits, most_repetitions
from replicas.grammar.compiler import GrammarError
from replicas.grammar_spec import GrammarKind, GrammarSpec
from tests.grammar_fuzz import fuzzed_spec

STRING = {"type": "string"}
NULL = {"type": "null"}
OVERLAP = [{"type": "string"}, {"type": "string", "maxLength": 3}]
ENDLESS = {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}, "required": ["b"]}


@pytest.fixture(scope="module")
def checker() -> GrammarChecker:
    return GrammarChecker()


def schema_spec(schema: object) -> GrammarSpec:
    return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))


def reason_of(checker: GrammarChecker, spec: GrammarSpec) -> str:
    with pytest.raises(GrammarError) as refused:
        checker.checked(spec)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}}, "#/properties/a/not: not cannot be enforced"),
        ({"type": "array", "items": STRING, "uniqueItems": True}, "#/uniqueItems: uniqueItems cannot be enforced"),
        ({"properties": {"a/b~c": {"if": STRING}}, "type": "object"}, "#/properties/a~1b~0c/if: if cannot be enforced"),
        ({"$defs": {"d": {"contains": {}}}, "type": "array", "items": {"$ref": "#/$defs/d"}}, "#/$defs/d/contains: contains cannot"),
        ({"type": "string", "format": "iri"}, "#/format: Unknown format: iri"),
        ({"anyOf": [NULL, {"oneOf": OVERLAP}]}, "#/anyOf/1/oneOf: oneOf cannot be enforced"),
        ({"type": "object", "properties": {"a": STRING}, "minProperties": 1, "maxProperties": 1}, "#/minProperties: the number of prop"),
        ({"type": "array", "items": {"type": "string", "pattern": "^(?=a)b"}}, "#/items/pattern: "),
        ({"type": "object", "patternProperties": {"^a": STRING, "a$": {"type": "null"}}}, "#/patternProperties: "),
        ({"items": {"$ref": "https://example.com/schema"}, "type": "array"}, "#/items/$ref: references to other documents"),
        ({"properties": {"a": {"propertyNames": {}}, "b": {"propertyNames": {}}}, "type": "object"}, "enforced (and 1 more)"),
        ({"type": "object", "properties": {"a": {"x-guidance": {}}}}, "#/properties/a: x-guidance sets options"),
        ({"type": "strin"}, "Invalid type: strin"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "Unsatisfiable schema"),
        ({"type": "string", "pattern": "^a{20000}$"}, "#/pattern repeats a part 20000 times"),
        ({"type": "string", "pattern": "a" * 9000}, "#/pattern must be at most 8192 bytes, got 9000"),
        ({"allOf": [{"pattern": f"a{number}"} for number in range(9)]}, "#: at most 8 patterns can be joined in one string, got 9"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": 9 * [{"allOf": [{"pattern": "b"}]}]}}}, "got 9"),
        ({"properties": {"a": {"const": {"b": "c" * 5000}}}}, "#/properties/a/const: a string must be at most 4096 bytes, got 5000"),
        ({"enum": ["d" * 4097]}, "#/enum: a string must be at most 4096 bytes, got 4097"),
        ({"$ref": "#/$defs/a", "$defs": {"a": ENDLESS}}, "forces a text"),
    ],
)  # fmt: skip
def test_schema_that_cannot_be_enforced_is_refused_with_keyword_and_path(schema: object, reason: str, checker: GrammarChecker) -> None:
    assert reason in reason_of(checker, schema_spec(schema))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must be JSON"),
        ("{", "must be JSON"),
        ("null", "must be a JSON object"),
        ('{"const": NaN}', "NaN is not JSON"),
        ('{"maximum": 1e999}', "out of range"),
        ('{"items":' * 63 + "{}" + "}" * 63, None),
        ('{"items":' * 64 + "{}" + "}" * 64, "nested at most 64 deep"),
        ('{"items":' * 9000 + "{}" + "}" * 9000, "nested at most 64 deep"),
        ('{"a":' + "[" * 12_000 + "]" * 12_000 + "}", "nested at most 64 deep"),
        ('{"title": "' + "t" * 131_072 + '"}', "at most 131072 bytes, got 131085"),
        ('{"const": "\ud800"}', "lone surrogate"),
    ],
)
def test_text_of_a_schema_is_checked_before_it_is_compiled(text: str, reason: str | None, checker: GrammarChecker) -> None:
    spec = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=text)
    if reason is None:
        assert checker.checked(spec).spec == spec
    else:
        assert reason in reason_of(checker, spec)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec(kind=GrammarKind.REGEX, text="(a{1000}){1000}"), "the regex repeats a part 1000000 times"),
        (GrammarSpec(kind=GrammarKind.REGEX, text="b" * 8193), "the regex must be at most 8192 bytes"),
        (GrammarSpec(kind=GrammarKind.REGEX, text="a", begins_after="x" * 65), "begins_after must be at most 64 characters"),
        (GrammarSpec(kind=GrammarKind.CHOICE, text=json.dumps(["a", "b" * 4097])), "a choice must be at most 4096 bytes"),
        (GrammarSpec(kind=GrammarKind.LARK, text="start: a\na: a"), ""),
        (GrammarSpec(kind=GrammarKind.LARK, text='start: "a" start'), "forces a text"),
        (GrammarSpec(kind=GrammarKind.LARK, text="start: " + " | ".join(f'"c{number}"' for number in range(10_001))), "max is 10000"),
        (
            GrammarSpec(
                kind=GrammarKind.STRUCTURAL_TAG,
                text=json.dumps({"structures": [{"begin": "<a>", "schema": {"pattern": "a{99999}"}, "end": ""}], "triggers": ["<a>"]}),
            ),
            "#/pattern repeats a part 99999 times",
        ),
    ],
)
def test_grammar_beyond_a_limit_is_refused(spec: GrammarSpec, reason: str, checker: GrammarChecker) -> None:
    assert reason in reason_of(checker, spec)


@pytest.mark.parametrize(
    ("pattern", "num"),
    [
        ("a*b+c?", 1),
        ("a{5}", 5),
        ("a{2,7}b{3,}", 7),
        ("(a{10}){100}", 1000),
        ("(a{10}b){3}c{4}", 30),
        (r"(a\{10}){3}", 3),
        ("([{9}]){2}", 2),
        ("[]{9}]{3}", 3),
        ("[^]a{9}]{3}", 3),
        ("((a{2}){3}|b{100}){2}", 200),
        ("a{,5}", 5),
        ("x{1}{2}{3}", 6),
        ("{", 1),
        ("a{99999999999999999999}", 10**18),
    ],
)
def test_repetitions_multiply_where_they_nest(pattern: str, num: int) -> None:
    assert most_repetitions(pattern) == num


@pytest.mark.parametrize(
    ("schema", "dropped", "left"),
    [
        ({"type": "array", "items": STRING, "uniqueItems": True}, ("#/uniqueItems",), {"type": "array", "items": STRING}),
        (
            {"type": "object", "properties": {"a": {"oneOf": OVERLAP}, "b": {"oneOf": [STRING, NULL]}}},
            ("#/properties/a/oneOf (enforced as anyOf)",),
            {"type": "object", "properties": {"a": {"anyOf": OVERLAP}, "b": {"oneOf": [STRING, NULL]}}},
        ),
        (
            {
                "type": "object",
                "properties": {"a": {**STRING, "format": "iri"}, "b": {**STRING, "format": "date"}, "c": {**STRING, "not": {}}},
            },
            ("#/properties/a/format", "#/properties/c/not"),
            {"type": "object", "properties": {"a": STRING, "b": {**STRING, "format": "date"}, "c": STRING}},
        ),
        (
            {"type": "array", "items": [{**STRING, "pattern": "(?=x)"}, {**STRING, "pattern": "^y$"}]},
            ("#/items/0/pattern",),
            {"type": "array", "items": [STRING, {**STRING, "pattern": "^y$"}]},
        ),
        (
            {"$defs": {"unused": {"not": {}}}, "type": "object", "if": {}, "then": {}, "additionalProperties": False},
            ("#/if", "#/then"),
            {"$defs": {"unused": {"not": {}}}, "type": "object", "additionalProperties": False},
        ),
        (
            {"anyOf": [NULL, STRING], "oneOf": OVERLAP},
            ("#/oneOf (enforced as anyOf)",),
            {"anyOf": [NULL, STRING], "allOf": [{"anyOf": OVERLAP}]},
        ),
        ({"type": "string", "maxLength": 3}, (), {"type": "string", "maxLength": 3}),
    ],
)  # fmt: skip
def test_only_what_cannot_be_enforced_is_dropped(
    schema: dict[str, object], dropped: tuple[str, ...], left: dict[str, object], checker: GrammarChecker
) -> None:
    found = checker.checked(schema_spec(schema), drops_unsupported=True)
    assert found.dropped == dropped
    assert json.loads(found.spec.text) == left
    jsonschema.Draft202012Validator.check_schema({key: value for key, value in left.items() if not isinstance(left.get("items"), list)})
    assert checker.checked(found.spec).dropped == ()


@pytest.mark.parametrize(
    "schema",
    [{"type": "strin", "uniqueItems": True}, {"not": {}, "type": "integer", "minimum": 3, "maximum": 2}, {"x-guidance": {}, "not": {}}],
)
def test_other_faults_are_never_dropped(schema: object, checker: GrammarChecker) -> None:
    with pytest.raises(GrammarError):
        checker.checked(schema_spec(schema), drops_unsupported=True)


def test_number_of_compiles_of_one_reduction_is_bounded(checker: GrammarChecker) -> None:
    many = {"type": "object", "properties": {f"p{number}": {**STRING, "format": "iri"} for number in range(300)}}
    found = checker.checked(schema_spec(many), drops_unsupported=True)
    assert found.dropped == tuple(f"#/properties/p{number}/format" for number in range(300))


def test_grammar_of_llama_cpp_arrives_as_lark(checker: GrammarChecker) -> None:
    found = checker.checked(GrammarSpec(kind=GrammarKind.GBNF, text='root ::= "a" | [0-9]+\n', begins_after="</think>"))
    assert found.spec.kind is GrammarKind.LARK
    assert found.spec.begins_after == "</think>"
    assert checker.checked(found.spec).spec == found.spec


def test_limits_are_those_that_the_checker_was_given() -> None:
    small = GrammarChecker(GrammarLimits(max_text_bytes=20, max_depth=2))
    assert "at most 20 bytes" in reason_of(small, schema_spec({"type": "string", "maxLength": 5}))
    assert "nested at most 2 deep" in reason_of(small, schema_spec({"a": [[]]}))


def test_made_up_grammars_are_accepted_or_refused_in_one_line(checker: GrammarChecker) -> None:
    draw = random.Random(5)
    outcomes: Counter[str] = Counter()
    reasons: list[str] = []
    for number in range(200):
        spec = fuzzed_spec(draw)
        try:
            found = checker.checked(spec, drops_unsupported=number % 2 == 0)
        except GrammarError as error:
            outcomes["refused"] += 1
            reasons.append(str(error))
        else:
            outcomes["accepted" if not found.dropped else "reduced"] += 1
            assert checker.checked(found.spec).dropped == ()
    assert min(outcomes["accepted"], outcomes["refused"], outcomes["reduced"]) >= 5, outcomes
    assert [reason for reason in reasons if not reason or "\n" in reason or len(reason) > 1_000] == []
