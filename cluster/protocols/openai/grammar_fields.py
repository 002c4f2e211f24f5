"""The spellings in which clients ask for a grammar: OpenAI's `response_format`, vLLM's `structured_outputs` and older `guided_*`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cluster.failures import BadRequest
from cluster.protocols.openai.generation_fields import GenerationFields, StructuredOutputs
from cluster.protocols.wire import json_type
from replicas.grammar_spec import GrammarKind, GrammarSpec
from replicas.response_format import AskedGrammar, FormatError, json_text, parse_response_format


def asked_grammar(body: GenerationFields) -> AskedGrammar | None:
    """The one grammar that the body asks for, None without any. Raises BadRequest, also for more than one."""
    try:
        found = list(_all_asked(body))
    except FormatError as error:
        raise BadRequest(f"Invalid value for '{error.param}': {error.problem}.", param=error.param, code="invalid_value") from error
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise BadRequest(
            f"'{first}' and '{second}' exclude each other: an answer follows one grammar.", param=second.split(".")[0], code="invalid_value"
        )
    if not found:
        return None
    asked, options = found[0], body.structured_outputs or StructuredOutputs()
    return replace(asked, spec=replace(asked.spec, is_compact=options.disable_any_whitespace is not False))


def _all_asked(body: GenerationFields) -> Iterator[AskedGrammar]:
    if body.response_format is not None:
        asked = parse_response_format(body.response_format)
        if asked is not None:
            yield asked
    if (outputs := body.structured_outputs) is not None:
        of = "structured_outputs"
        yield from _asked(f"{of}.json", GrammarKind.JSON_SCHEMA, outputs.json_)
        if outputs.json_object:
            yield AskedGrammar(spec=GrammarSpec(kind=GrammarKind.JSON_OBJECT), param=f"{of}.json_object")
        yield from _asked(f"{of}.regex", GrammarKind.REGEX, outputs.regex)
        yield from _asked(f"{of}.choice", GrammarKind.CHOICE, outputs.choice)
        yield from _asked(f"{of}.grammar", _language(outputs.grammar), outputs.grammar)
        yield from _asked(f"{of}.structural_tag", GrammarKind.STRUCTURAL_TAG, outputs.structural_tag)
    yield from _asked("guided_json", GrammarKind.JSON_SCHEMA, body.guided_json)
    yield from _asked("guided_regex", GrammarKind.REGEX, body.guided_regex)
    yield from _asked("guided_choice", GrammarKind.CHOICE, body.guided_choice)
    yield from _asked("guided_grammar", _language(body.guided_grammar), body.guided_grammar)


def _asked(param: str, kind: GrammarKind, value: object) -> Iterator[AskedGrammar]:
    if value is None:
        return
    if isinstance(value, list):
        _check_choices(value, param)
    text = value if isinstance(value, str) else json_text(value, param)
    if not text:
        raise FormatError(param, "must not be empty")
    yield AskedGrammar(spec=GrammarSpec(kind=kind, text=text), param=param)


def _check_choices(choices: list[object], param: str) -> None:
    if not choices:
        raise FormatError(param, "must hold at least one string, got an empty array")
    for index, choice in enumerate(choices):
        if not isinstance(choice, str):
            raise FormatError(param, f"must hold strings only, got {json_type(choice)} at {index}")
        if not choice:
            raise FormatError(param, f"must hold non-empty strings, got an empty one at {index}")


def _language(text: str | None) -> GrammarKind:
    """vLLM takes both languages in one field. Only GBNF defines rules by `::=`."""
    return GrammarKind.GBNF if text is not None and "::=" in text else GrammarKind.LARK
