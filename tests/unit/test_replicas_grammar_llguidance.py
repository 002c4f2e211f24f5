"""Grammars over the default model's real vocabulary; expected texts are judged by `re`, `json` and `jsonschema`."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from replicas.grammar.compiler import GrammarError
from replicas.grammar.llguidance_compiler import LLGuidanceCompiler
from replicas.grammar.matcher import GrammarMatcher
from replicas.grammar_spec import GrammarKind, GrammarSpec
from tests.grammar_masks import EOS, NUM_ROWS, allowed_tokens, default_backend, default_compiler, refused_at, token_ids

PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "favourite_colour": {"enum": ["red", "green", "blue"]},
        "pets": {"type": "array", "items": {"type": "string", "pattern": "^[A-Z][a-z]{1,5}$"}, "maxItems": 2},
    },
    "required": ["first_name", "age", "favourite_colour"],
    "additionalProperties": False,
}
GBNF = 'root ::= greeting " " name "!"\ngreeting ::= "Hello" | "Bye"\nname ::= [A-Z] [a-z]{2,8}\n'
LARK = 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[1-9][0-9]{0,3}/\n'
TAGS = {
    "structures": [
        {"begin": "<call>f(", "schema": {"type": "integer"}, "end": ")</call>"},
        {"begin": "<call>g(", "schema": {"type": "boolean"}, "end": ")</call>"},
        {"begin": "<note>", "schema": {"type": "string"}, "end": ""},
    ],
    "triggers": ["<call>", "<note>"],
}


def schema_spec(schema: object, *, is_compact: bool = True) -> GrammarSpec:
    return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema), is_compact=is_compact)


SPECS = {
    "schema": schema_spec(PERSON),
    "spaced": schema_spec(PERSON, is_compact=False),
    "object": GrammarSpec(kind=GrammarKind.JSON_OBJECT),
    "regex": GrammarSpec(kind=GrammarKind.REGEX, text=r"(\d{2,4}-){2}[a-f]+|none"),
    "choice": GrammarSpec(kind=GrammarKind.CHOICE, text='["yes", "no", "no idea", "\\"quoted\\\\ \\u00e9"]'),
    "lark": GrammarSpec(kind=GrammarKind.LARK, text=LARK),
    "gbnf": GrammarSpec(kind=GrammarKind.GBNF, text=GBNF),
    "tags": GrammarSpec(kind=GrammarKind.STRUCTURAL_TAG, text=json.dumps(TAGS)),
}


def is_right(name: str, text: str) -> bool:
    """Whether the finished text follows the grammar, by another implementation."""
    if name in ("schema", "spaced", "object"):
        if name == "schema" and json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False) != text and "\\" not in text:
            return False
        schema = {"type": "object"} if name == "object" else PERSON
        return not list(jsonschema.Draft202012Validator(schema).iter_errors(json.loads(text)))
    patterns = {
        "regex": r"([0-9]{2,4}-){2}[a-f]+|none",
        "choice": "|".join(map(re.escape, ["yes", "no", "no idea", '"quoted\\ é'])),
        "lark": r"[1-9][0-9]{0,3}(\+[1-9][0-9]{0,3})*",
        "gbnf": r"(Hello|Bye) [A-Z][a-z]{2,8}!",
        "tags": r"((?!<call>|<note>)(.|\n)|<call>f\((0|-?[1-9][0-9]*)\)</call>|<call>g\((true|false)\)</call>|<note>\"([^\"\\]|\\.)*\")*",
    }
    return re.fullmatch(patterns[name], text) is not None


@pytest.fixture(scope="module")
def compiler(default_model_dir: Path) -> LLGuidanceCompiler:
    return default_compiler(default_model_dir)


def walk(matcher: GrammarMatcher, seed: int, most: int = 60) -> tuple[list[int], bool]:
    """Random allowed tokens, and whether they end the text."""
    draw = random.Random(seed)
    ids: list[int] = []
    while len(ids) < most:
        allowed = allowed_tokens(matcher)
        assert allowed, f"no token is allowed after {ids}"
        assert (EOS in allowed) == matcher.may_end
        assert (allowed == {EOS}) == matcher.must_end
        # Short tokens are likelier than their share of the vocabulary, so that texts also end.
        choices = sorted(allowed)
        token_id = EOS if EOS in allowed and draw.random() < 0.3 else draw.choice(choices[: 1 + int(len(choices) * draw.random() ** 4)])
        assert matcher.accept(token_id), (ids, token_id, matcher.error)
        ids.append(token_id)
        if token_id == EOS:
            return ids, True
    return ids, False


@pytest.mark.parametrize("name", SPECS)
def test_walk_through_the_masks_ends_in_a_text_that_follows_the_grammar(
    name: str, compiler: LLGuidanceCompiler, default_model_dir: Path
) -> None:
    backend = default_backend(default_model_dir)
    num_ended = 0
    for seed in range(6):
        ids, has_ended = walk(compiler.matcher(SPECS[name]), seed)
        if has_ended:
            num_ended += 1
            text = backend.decode(ids[:-1], skip_special_tokens=False)
            assert is_right(name, text), text
    assert num_ended > 0


@pytest.mark.parametrize("name", SPECS)
def test_rollback_restores_every_earlier_mask(name: str, compiler: LLGuidanceCompiler) -> None:
    ids, _ = walk(compiler.matcher(SPECS[name]), seed=1, most=12)
    matcher = compiler.matcher(SPECS[name])
    masks = []
    for token_id in ids:
        masks.append((allowed_tokens(matcher), matcher.may_end, matcher.must_end, matcher.forced_tokens()))
        assert matcher.accept(token_id)
    draw = random.Random(2)
    for _ in range(8):
        num_back = draw.randint(1, len(ids))
        matcher.rollback(num_back)
        place = len(ids) - num_back
        assert matcher.num_tokens == place
        assert (allowed_tokens(matcher), matcher.may_end, matcher.must_end, matcher.forced_tokens()) == masks[place]
        assert matcher.accept_all(ids[place:]) == num_back


@pytest.mark.parametrize("name", SPECS)
def test_matcher_made_anew_from_the_emitted_tokens_has_the_same_mask(name: str, compiler: LLGuidanceCompiler) -> None:
    followed = compiler.matcher(SPECS[name])
    ids, _ = walk(followed, seed=3, most=20)
    rebuilt = compiler.matcher(SPECS[name])
    assert rebuilt.accept_all(ids) == len(ids)
    assert allowed_tokens(rebuilt) == allowed_tokens(followed)
    assert rebuilt.forced_tokens() == followed.forced_tokens()
    assert (rebuilt.may_end, rebuilt.must_end, rebuilt.num_tokens) == (followed.may_end, followed.must_end, followed.num_tokens)


@pytest.mark.parametrize("name", SPECS)
def test_forced_token_is_the_only_one_allowed(name: str, compiler: LLGuidanceCompiler) -> None:
    matcher = compiler.matcher(SPECS[name])
    ids, _ = walk(compiler.matcher(SPECS[name]), seed=4, most=25)
    fresh = compiler.matcher(SPECS[name])  # asked for its masks alone, as an engine without forced tokens does
    for token_id in ids:
        forced = matcher.forced_tokens()
        if forced:
            assert allowed_tokens(fresh) == {forced[0]} == {token_id}
        matcher.accept(token_id)
        fresh.accept(token_id)


def test_forced_tokens_are_those_of_the_tokenizer(compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    matcher = compiler.matcher(SPECS["schema"])
    forced = matcher.forced_tokens()
    # The last of them may be `":` or `":"`: it is not forced.
    assert forced == token_ids(default_backend(default_model_dir), '{"first_name":')[:-1]
    assert matcher.accept_all(forced) == len(forced)
    assert len(allowed_tokens(matcher)) > 1


def test_invalid_answer_is_stopped_at_its_first_wrong_token(compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    backend = default_backend(default_model_dir)
    right = '{"first_name":"Ada","age":36,"favourite_colour":"red"}'
    assert refused_at(compiler.matcher(SPECS["schema"]), [*token_ids(backend, right), EOS]) is None
    wrong = right.replace("red", "pink")
    place = refused_at(compiler.matcher(SPECS["schema"]), token_ids(backend, wrong))
    assert place is not None
    assert wrong.startswith(backend.decode(token_ids(backend, wrong)[:place]))
    assert "p" in backend.decode(token_ids(backend, wrong)[place : place + 1])


def test_token_that_is_not_allowed_leaves_an_error_for_good(compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    matcher = compiler.matcher(SPECS["choice"])
    (hello,) = token_ids(default_backend(default_model_dir), "hello")
    assert not matcher.accept(hello)
    assert matcher.error is not None
    assert "\n" not in matcher.error
    assert (matcher.may_end, matcher.must_end, matcher.forced_tokens(), matcher.accept_all([EOS])) == (False, False, [], 0)
    assert len(allowed_tokens(matcher)) == NUM_ROWS  # a row that the sampler can draw from; the request has failed


def test_drafts_that_are_not_allowed_leave_no_error(compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    matcher = compiler.matcher(SPECS["regex"])
    ids = token_ids(default_backend(default_model_dir), "12-34x")
    assert matcher.accept_all(ids) == len(ids) - 1
    assert matcher.error is None
    matcher.rollback(len(ids) - 1)
    assert allowed_tokens(matcher) == allowed_tokens(compiler.matcher(SPECS["regex"]))


def test_eos_counts_as_a_token_and_ends_the_text(compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    matcher = compiler.matcher(SPECS["choice"])
    (no,) = token_ids(default_backend(default_model_dir), "no")
    assert matcher.accept_all([no, EOS]) == 2
    assert (matcher.num_tokens, matcher.may_end, matcher.must_end) == (2, True, True)
    assert allowed_tokens(matcher) == {EOS}
    matcher.rollback(1)
    assert (matcher.num_tokens, matcher.may_end, matcher.must_end) == (1, True, False)
    assert matcher.accept_all(token_ids(default_backend(default_model_dir), " idea")) == 1
    assert matcher.must_end


def test_eos_before_the_end_is_an_error(compiler: LLGuidanceCompiler) -> None:
    matcher = compiler.matcher(SPECS["schema"])
    assert not matcher.accept(EOS)
    assert matcher.error is not None


def test_rollback_of_more_than_was_accepted_is_our_mistake(compiler: LLGuidanceCompiler) -> None:
    with pytest.raises(ValueError, match="from 0 to 0"):
        compiler.matcher(SPECS["schema"]).rollback(1)


def test_row_of_another_size_is_our_mistake(compiler: LLGuidanceCompiler) -> None:
    with pytest.raises(ValueError, match="1536 words"):
        compiler.matcher(SPECS["schema"]).fill(np.zeros(1537, dtype=np.int32))


def test_rows_behind_the_vocabulary_and_special_tokens_are_never_allowed(default_model_dir: Path) -> None:
    compiler = LLGuidanceCompiler((default_model_dir / "tokenizer.json").read_text(), NUM_ROWS + 70, {EOS})
    allowed = allowed_tokens(compiler.matcher(GrammarSpec(kind=GrammarKind.REGEX, text="(.|\n)*")), NUM_ROWS + 70)
    assert EOS in allowed
    assert max(allowed) < NUM_ROWS
    assert allowed.isdisjoint({0, 1, 3})  # <|endoftext|>, <|im_start|>, <repo_name>
    compiler.close()


def test_whitespace_between_tokens_of_json_is_bounded(compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    backend = default_backend(default_model_dir)

    def passes(text: str, name: str) -> bool:
        return compiler.matcher(SPECS[name]).accept_all(token_ids(backend, text)) == len(token_ids(backend, text))

    assert passes('{"first_name":"A"', "schema")
    assert not passes('{"first_name": "A"', "schema")
    assert passes('{\n  "first_name": "A"', "spaced")
    assert passes('{"first_name":' + 20 * "\n" + '"A"', "spaced")
    assert not passes('{"first_name":' + 21 * "\n" + '"A"', "spaced")


def test_schema_within_lark_has_the_same_bounds_on_whitespace(compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    spec = GrammarSpec(kind=GrammarKind.LARK, text='start: "answer: " value\nvalue: %json {"type": "array", "items": {"type": "null"}}')
    backend = default_backend(default_model_dir)
    matcher = compiler.matcher(spec)
    assert matcher.accept_all(token_ids(backend, "answer: [null,null]")) == len(token_ids(backend, "answer: [null,null]"))
    assert matcher.must_end
    matcher = compiler.matcher(spec)
    assert matcher.accept_all(token_ids(backend, "answer: [null, null]")) < len(token_ids(backend, "answer: [null, null]"))


def test_compiled_grammar_is_used_again_and_the_number_kept_is_bounded(default_model_dir: Path) -> None:
    compiler = LLGuidanceCompiler((default_model_dir / "tokenizer.json").read_text(), NUM_ROWS, {EOS}, max_cached=2)
    for text in ("a+", "a+", "b+", "c+", "a+"):  # c+ puts a+ out
        compiler.matcher(GrammarSpec(kind=GrammarKind.REGEX, text=text))
    with pytest.raises(GrammarError):
        compiler.matcher(GrammarSpec(kind=GrammarKind.REGEX, text="(?=a)b"))
    statistics = compiler.statistics()
    assert (statistics.num_compiles, statistics.num_cache_hits, statistics.num_refused) == (5, 1, 1)
    assert statistics.compile_s > 0
    compiler.close()


def test_matchers_of_one_grammar_are_independent(compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    first, second = compiler.matcher(SPECS["choice"]), compiler.matcher(SPECS["choice"])
    before = allowed_tokens(second)
    assert first.accept_all(token_ids(default_backend(default_model_dir), "yes")) == 1
    assert first.must_end
    assert (second.num_tokens, allowed_tokens(second)) == (0, before)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (schema_spec({"type": "array", "uniqueItems": True}), 'Unimplemented keys: ["uniqueItems"]'),
        (schema_spec({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}), 'Unimplemented keys: ["uniqueItems"]'),
        (GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text='{"type": '), "JSON schema"),
        (GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text="[]"), "JSON schema"),
        (GrammarSpec(kind=GrammarKind.REGEX, text="a("), "regex parse error"),
        (GrammarSpec(kind=GrammarKind.REGEX, text=r"(a)\1"), "backreferences"),
        (GrammarSpec(kind=GrammarKind.CHOICE, text="[]"), "choice"),
        (GrammarSpec(kind=GrammarKind.CHOICE, text='["a", 1]'), "choice"),
        (GrammarSpec(kind=GrammarKind.CHOICE, text="a"), "choice"),
        (GrammarSpec(kind=GrammarKind.GBNF, text='root := "a"'), "not GBNF"),
        (GrammarSpec(kind=GrammarKind.GBNF, text='other ::= "a"'), "not GBNF"),
        (GrammarSpec(kind=GrammarKind.LARK, text="start: other"), "other"),
        (GrammarSpec(kind=GrammarKind.LARK, text='start: "a" <|im_end|>'), "line 1: <|im_end|> names a token"),
        (GrammarSpec(kind=GrammarKind.LARK, text='start: "a"\n  | <[2]>'), "line 2"),
        (GrammarSpec(kind=GrammarKind.LARK, text='%llguidance {"no_forcing": true}\nstart: "a"'), "%llguidance"),
        (GrammarSpec(kind=GrammarKind.LARK, text='start: %json {"x-guidance": {"lenient": true}, "not": {}}'), "x-guidance"),
        (GrammarSpec(kind=GrammarKind.LARK, text="start: %json {"), "JSON object"),
        (GrammarSpec(kind=GrammarKind.LARK, text='start: @other "a"'), "another grammar"),
        (GrammarSpec(kind=GrammarKind.LARK, text='start: word\nword[max_tokens=3]: "a"'), "max_tokens is not supported"),
        (GrammarSpec(kind=GrammarKind.STRUCTURAL_TAG, text='{"structures": []}'), "triggers"),
        (
            GrammarSpec(
                kind=GrammarKind.STRUCTURAL_TAG,
                text=json.dumps({"structures": [{"begin": "<a>", "schema": {"x-guidance": {"lenient": True}}}], "triggers": ["<"]}),
            ),
            "x-guidance",
        ),
    ],
)
def test_what_cannot_be_enforced_or_must_not_be_said_is_refused_in_one_line(
    spec: GrammarSpec, reason: str, compiler: LLGuidanceCompiler
) -> None:
    with pytest.raises(GrammarError) as refused:
        compiler.matcher(spec)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec(kind=GrammarKind.LARK, text='start: "<|im_end|>" // not <|im_end|>\n # <[1]>'),
        GrammarSpec(kind=GrammarKind.LARK, text='start: "<|im" "_end|>"'),
        GrammarSpec(kind=GrammarKind.REGEX, text=r"<\|im_end\|>"),
        GrammarSpec(kind=GrammarKind.CHOICE, text='["<|im_end|>"]'),
    ],
)
def test_name_of_a_special_token_is_written_in_letters(spec: GrammarSpec, compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    matcher = compiler.matcher(spec)
    ids: list[int] = []
    while not matcher.must_end:
        token_id = min(allowed_tokens(matcher))
        assert token_id not in {0, 1, EOS}
        assert matcher.accept(token_id)
        ids.append(token_id)
    assert default_backend(default_model_dir).decode(ids, skip_special_tokens=False) == "<|im_end|>"
    assert len(ids) > 3


@pytest.mark.parametrize("digits", [r"\d\d", r"[\d]{2}", r"[^\D]{2}", r"\w\w"])
def test_classes_of_a_regex_are_ascii(digits: str, compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    backend = default_backend(default_model_dir)
    spec = GrammarSpec(kind=GrammarKind.REGEX, text=digits)
    assert compiler.matcher(spec).accept_all(token_ids(backend, "42")) == 2
    assert compiler.matcher(spec).accept_all(token_ids(backend, "٤٢")) == 0


def test_long_forced_text_is_computed_once(compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    matcher = compiler.matcher(schema_spec({"const": "ab " * 300}))
    run = matcher.forced_tokens()
    assert run == token_ids(default_backend(default_model_dir), '"' + "ab " * 300 + '"')
    for place, token_id in enumerate(run):
        assert matcher.forced_tokens() == run[place:]
        assert matcher.accept(token_id)
    assert matcher.must_end
