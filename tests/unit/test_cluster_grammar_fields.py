"""Every spelling of a grammar on the wire, and what each becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.failures import BadRequest
from cluster.protocols.openai.chat import ChatDialect
from cluster.protocols.openai.completions import CompletionDialect
from cluster.settings.limits import RequestLimits
from replicas.grammar_spec import GrammarKind, GrammarSpec
from replicas.response_format import AskedGrammar, FormatError, parse_response_format

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "é"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"const":"é"}}}'
"""Members in the client's order, which is the order of the answer."""
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


def in_format(json_schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


def asked(**fields: Any) -> AskedGrammar | None:
    """By both endpoints, which must agree."""
    limits = RequestLimits()
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    by_chat = ChatDialect().parse(json.dumps(body).encode(), limits).asked_grammar
    by_completion = CompletionDialect().parse(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), limits).asked_grammar
    assert by_chat == by_completion
    return by_chat


@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        ({"response_format": JSON_SCHEMA}, "json_schema", SCHEMA_TEXT, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA_TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"json": SCHEMA_TEXT}}, "json_schema", SCHEMA_TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "[0-9]{4}"}}, "regex", "[0-9]{4}", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice", '["yes","no"]', "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"', "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "gbnf", 'root ::= "a"', "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": {"a": 1}}}, "structural_tag", '{"a":1}', "structured_outputs.structural_tag"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA_TEXT, "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["yes", "no"]}, "choice", '["yes","no"]', "guided_choice"),
        ({"guided_grammar": 'root ::= "a"'}, "gbnf", 'root ::= "a"', "guided_grammar"),
    ],
)  # fmt: skip
def test_grammar_of_each_spelling_is_compact_and_begins_at_once(fields: dict[str, Any], kind: str, text: str, param: str) -> None:
    assert asked(**fields) == AskedGrammar(spec=GrammarSpec(kind=GrammarKind(kind), text=text), param=param)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "unsupported": "warn"}},
        {"guided_json": None, "guided_choice": None},
    ],
)
def test_body_without_a_grammar_has_none(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


def test_options_of_structured_outputs_hold_for_a_response_format_too() -> None:
    found = asked(response_format=JSON_SCHEMA, structured_outputs={"disable_any_whitespace": False, "unsupported": "warn"})
    assert found is not None
    assert found.spec == GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=SCHEMA_TEXT, is_compact=False)


@pytest.mark.parametrize(("strict", "is_strict"), [(True, True), (False, False), (None, False)])
def test_strict_of_a_schema_is_read(strict: bool | None, is_strict: bool) -> None:
    found = asked(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": strict, "description": "d"}})
    assert found is not None
    assert found.is_strict is is_strict


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (in_format({"name": "n"}), "response_format.json_schema.schema"),
        (in_format({"name": "a b", "schema": {}}), "response_format.json_schema.name"),
        (in_format({"name": "n", "schema": {}, "strict": 1}), "response_format.json_schema.strict"),
        (in_format({"name": "n", "schema": {}, "mode": 1}), "response_format.json_schema.mode"),
        (in_format({"name": "n", "schema": {}, "description": 1}), "response_format.json_schema.description"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"unsupported": "ignore"}}, "structured_outputs.unsupported"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_decoding_backend": "x"}, "guided_decoding_backend"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"json_object": True}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_bad_grammar_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        asked(**fields)
    assert caught.value.param == param


def test_number_that_python_cannot_write_is_refused() -> None:
    """JSON allows integers of any length; Python writes none of more than 4,300 digits."""
    with pytest.raises(FormatError, match="thousands of digits"):
        parse_response_format({"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 10**5000}}})
