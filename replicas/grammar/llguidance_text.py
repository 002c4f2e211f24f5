"""A grammar in the language of llguidance (https://github.com/guidance-ai/llguidance), under options and limits that are ours alone."""

from __future__ import annotations

import json
from typing import Any

import llguidance

from replicas.grammar.compiler import GrammarError
from replicas.grammar.languages.lark import checked_lark
from replicas.grammar.languages.schema_formats import with_exact_formats
from replicas.grammar.languages.structural_tags import lark_of_tags, parse_tags
from replicas.grammar_spec import GrammarKind, GrammarSpec

OPTIONS_KEY = "x-guidance"
"""A key of a schema through which options of llguidance are set; it can turn every check off."""
_STRICT = {"lenient": False, "coerce_one_of": False}
COMPACT = {**_STRICT, "whitespace_flexible": False}
SPACED = {**_STRICT, "whitespace_pattern": r"[ \n\t]{1,20}"}
"""Bounded: with whitespace of any length, models fall into endless lines."""
_MAX_MESSAGE_CHARS = 300


def parser_limits() -> llguidance.LLParserLimits:
    """Bounds of compiling and of each step. A real schema of some thousand lines stays far below them."""
    return llguidance.LLParserLimits(
        max_items_in_row=10_000,
        initial_lexer_fuel=500_000,
        max_lexer_states=50_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )


def grammar_text(spec: GrammarSpec) -> str:
    """What llguidance compiles for `spec`. Raises GrammarError for what is not even well-formed, and for what clients must not use."""
    options = COMPACT if spec.is_compact else SPACED
    match spec.kind:
        case GrammarKind.JSON_OBJECT:
            return _of_schema('{"type": "object"}', options)
        case GrammarKind.JSON_SCHEMA:
            return _of_schema(spec.text, options)
        case GrammarKind.REGEX:
            return _of_regex(spec.text)
        case GrammarKind.CHOICE:
            # As one terminal: as rules, thousands of choices are slow.
            texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in parse_choices(spec.text))
            return llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        case GrammarKind.GBNF:
            return _of_lark(lark_of_gbnf(spec.text), options)
        case GrammarKind.LARK:
            return _of_lark(spec.text, options)
        case GrammarKind.STRUCTURAL_TAG:
            return _of_lark(lark_of_tags(parse_tags(spec.text)), options)


def refusal(grammar: str) -> str | None:
    """Why llguidance would not compile this text of `grammar_text`, in one line without any of the grammar's state; None if it would.

    A chain of thousands of references needs more stack than a thread usually has (`big_stack`), or the process dies.
    """
    message = llguidance.LLMatcher.validate_grammar(grammar, limits=parser_limits())
    return one_line(message) if message else None


def one_line(message: str) -> str:
    """An error of llguidance without the dump that may follow it."""
    text = " ".join(message.split("\n<state>")[0].replace("<non-verbose/>", "").split())
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[:_MAX_MESSAGE_CHARS]}..."


def parse_choices(text: str) -> list[str]:
    """The strings of a CHOICE. Raises GrammarError."""
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError("choice must be a JSON array of strings") from error
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise GrammarError("choice must be a list of non-empty strings, at least one")
    return list(dict.fromkeys(choices))


def lark_of_gbnf(text: str) -> str:
    """A grammar of llama.cpp as Lark. Raises GrammarError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark = gbnf_to_lark(text)
    except (Exception, RecursionError) as error:  # of the converter: it raises bare ones
        raise GrammarError(f"grammar: not GBNF: {one_line(str(error)) or type(error).__name__}") from error
    return lark.removeprefix("%llguidance {}")


def without_options(schema: dict[str, Any], where: str) -> dict[str, Any]:
    """`schema` itself. Raises GrammarError if it sets options of llguidance."""
    if OPTIONS_KEY in schema:
        raise GrammarError(f"{where}: {OPTIONS_KEY} sets options of the compiler, which belong to the server")
    return schema


def _of_regex(pattern: str) -> str:
    """Digits and letters are ASCII, as they are in the patterns of a schema: whoever writes `\\d` does not expect Arabic digits."""
    if not any(escape in pattern for escape in ("\\d", "\\D", "\\w", "\\W")):
        return llguidance.LLMatcher.grammar_from_regex(pattern)
    return llguidance.LLMatcher.grammar_from_lark(f"start: /{llguidance.regex_to_lark(pattern, 'dw')}/")


def _of_schema(text: str, options: dict[str, Any]) -> str:
    try:
        schema = json.loads(text) if '"format"' in text else None
        if isinstance(schema, dict):
            text = json.dumps(with_exact_formats(schema))
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"JSON schema: {one_line(str(error))}") from error


def _of_lark(text: str, options: dict[str, Any]) -> str:
    def rewrite(schema: dict[str, Any], where: str) -> dict[str, Any]:
        return {**with_exact_formats(without_options(schema, where)), OPTIONS_KEY: options}

    return llguidance.LLMatcher.grammar_from_lark(checked_lark(text, rewrite))
