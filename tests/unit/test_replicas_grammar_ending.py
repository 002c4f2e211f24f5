"""JSON that comes to its end before `max_tokens`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import pytest

from replicas.grammar.json_ending import StringPlace, StringState
from replicas.grammar.llguidance_compiler import LLGuidanceCompiler
from replicas.grammar.token_rows import TokenRows
from replicas.grammar_spec import GrammarKind, GrammarSpec
from tests.grammar_masks import EOS, allowed_tokens, default_backend, default_compiler, drawn_token, mask_row, token_ids

NODE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["name", "children"],
}
LONG = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 5}, "ok": {"type": "boolean"}},
    "required": ["text", "ok"],
}
OPTIONAL = {f"optional_{number}": {"type": "string"} for number in range(3)}
REQUIRED = {f"required_{number}": {"enum": ["red", "blue"]} for number in range(7)}
SCHEMAS = {
    "tree": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "numbers": {"type": "array", "items": {"type": "number"}, "minItems": 2},
    "map": {"type": "object", "additionalProperties": {"type": ["string", "null", "object"]}},
    "long": LONG,
    "number": {"type": "number"},
    "address": {"type": "object", "properties": {"mail": {"type": "string", "format": "email"}}, "required": ["mail"]},
    "code": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+-[0-9]+$"}, "minItems": 1},
    "many": {"type": "object", "properties": OPTIONAL | REQUIRED, "required": list(REQUIRED), "additionalProperties": False},
}


@pytest.fixture(scope="module")
def compiler(default_model_dir: Path) -> LLGuidanceCompiler:
    return default_compiler(default_model_dir)


def spec_of(name: str, *, is_compact: bool = True) -> GrammarSpec:
    return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(SCHEMAS[name]), is_compact=is_compact)


@pytest.mark.parametrize("is_compact", [True, False])
@pytest.mark.parametrize("name", SCHEMAS)
def test_random_text_ends_within_max_tokens_and_is_valid(
    name: str, is_compact: bool, compiler: LLGuidanceCompiler, default_model_dir: Path
) -> None:
    spec = spec_of(name, is_compact=is_compact)
    for seed in range(2):
        draw = random.Random(seed)
        matcher = compiler.matcher(spec, max_tokens=96)
        ids: list[int] = []
        while EOS not in ids:
            assert len(ids) < 96, default_backend(default_model_dir).decode(ids)
            ids.append(drawn_token(matcher, draw))
            assert matcher.accept(ids[-1])
        text = default_backend(default_model_dir).decode(ids[:-1], skip_special_tokens=False)
        jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(text))


def test_masks_are_narrowed_only_when_three_quarters_of_the_tokens_are_used(compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    near, far = compiler.matcher(spec_of("long"), max_tokens=200), compiler.matcher(spec_of("long"))
    backend = default_backend(default_model_dir)
    (letter,) = token_ids(backend, "x")
    ids = [*token_ids(backend, '{"text":"'), *([letter] * 200)]
    narrowed = []
    for token_id in ids[:152]:
        wide, narrow = mask_row(far), mask_row(near)
        assert not (narrow & ~wide).any()
        narrowed.append(bool((narrow != wide).any()))
        assert near.accept(token_id)
        assert far.accept(token_id)
    assert narrowed == [False] * 150 + [True] * 2
    assert {backend.decode([token_id])[:1] for token_id in allowed_tokens(near)} == {'"'}


def test_masks_are_narrowed_earlier_if_the_shortest_answer_needs_it(compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    (brace,) = token_ids(default_backend(default_model_dir), "{")
    numbers = []
    for max_tokens in (1_000, 60):
        matcher = compiler.matcher(spec_of("map"), max_tokens=max_tokens)
        assert matcher.accept(brace)
        numbers.append(len(allowed_tokens(matcher)))
        matcher = compiler.matcher(spec_of("many"), max_tokens=max_tokens)
        numbers.append(len(allowed_tokens(matcher)))
    # Seven required properties of some seven tokens do not fit into 45; an empty map does.
    assert numbers[0] == numbers[2] > 1
    assert numbers[1] >= numbers[3]


def test_accepts_what_it_would_not_choose_and_rolls_back(compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    matcher = compiler.matcher(spec_of("map"), max_tokens=4)
    ids = token_ids(default_backend(default_model_dir), '{"a \\" quote":"b","c":null}')
    assert matcher.accept_all(ids) == len(ids)
    assert matcher.must_end
    matcher.rollback(len(ids) - 1)
    assert matcher.num_tokens == 1
    assert matcher.accept_all([*ids[1:], EOS]) == len(ids)


def test_thought_counts_as_tokens_of_the_answer(compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    spec = GrammarSpec(kind=GrammarKind.JSON_OBJECT, begins_after="</think>")
    (brace,) = token_ids(default_backend(default_model_dir), "{")
    thought = token_ids(default_backend(default_model_dir), "well, well, well </think>")
    numbers = []
    for max_tokens in (200, len(thought)):
        matcher = compiler.matcher(spec, max_tokens=max_tokens)
        assert matcher.accept_all([*thought, brace]) == len(thought) + 1
        numbers.append(len(allowed_tokens(matcher)))
    assert numbers[0] > 10
    assert numbers[1] < 5  # the object is closed at once


def test_other_grammars_are_not_narrowed(compiler: LLGuidanceCompiler) -> None:
    spec = GrammarSpec(kind=GrammarKind.REGEX, text='["a}]*')
    assert allowed_tokens(compiler.matcher(spec, max_tokens=0)) == allowed_tokens(compiler.matcher(spec))


def test_place_in_a_string_follows_quotes_and_escapes() -> None:
    pieces = [b'{"a', b'":"', b"\\", b'"', b"x\\\\", b'"}', b"<end>"]
    state = StringState(TokenRows(pieces, 7, frozenset([6])))
    places = []
    for token_id in (0, 1, 2, 3, 4, 5, 6):
        state.accept(token_id)
        places.append(state.current)
    inside, outside = StringPlace.INSIDE, StringPlace.OUTSIDE
    assert places == [inside, inside, StringPlace.ESCAPED, inside, inside, outside, outside]
    state.rollback(4)
    assert state.current is StringPlace.ESCAPED
