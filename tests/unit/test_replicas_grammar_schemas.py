"""JSON Schemas with instances: every valid one passes token by token, no invalid one does."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from replicas.grammar.compiler import GrammarError
from replicas.grammar.llguidance_compiler import LLGuidanceCompiler
from replicas.grammar_spec import GrammarKind, GrammarSpec
from tests.data_paths import JSON_SCHEMA_SUITE, MASKBENCH, OWN_DATA, PUBLIC_DATA, needs_public
from tests.grammar_masks import EOS, default_backend, default_compiler, refused_at, token_ids

OWN = [json.loads(line) for line in (OWN_DATA / "json_schemas.jsonl").read_text().splitlines()]

REFUSED = {
    '["not"': 19,
    "format": 5,
    "oneOf": 5,
    '["dependencies"': 2,
    "propertyNames": 1,
    "uniqueItems": 1,
    "patternProperty": 1,
}
"""What the schemas of MaskBench's sample ask for that cannot be enforced, counted in their text; one has both `dependencies` and `not`."""


@pytest.fixture(scope="module")
def compiler(default_model_dir: Path) -> LLGuidanceCompiler:
    return default_compiler(default_model_dir)


def spec_of(schema: object) -> GrammarSpec:
    return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))


def passes(compiler: LLGuidanceCompiler, backend: Tokenizer, spec: GrammarSpec, instance: object) -> bool:
    """Whether the compact text of an instance can be written, mask by mask, and ended."""
    text = json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
    return refused_at(compiler.matcher(spec), [*token_ids(backend, text), EOS]) is None


@pytest.mark.parametrize("row", OWN, ids=[row["name"] for row in OWN])
def test_valid_instances_pass_and_invalid_ones_do_not(row: dict[str, Any], compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    backend = default_backend(default_model_dir)
    spec = spec_of(row["schema"])
    validator = jsonschema.Draft202012Validator(row["schema"], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    for instance in row["valid"]:
        validator.validate(instance)
        assert passes(compiler, backend, spec, instance), instance
    for instance in row["invalid"]:
        assert not passes(compiler, backend, spec, instance), instance


def test_multiple_of_is_exact_where_binary_fractions_are_not(compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    """As decimals, 19.99 is 1,999 times 0.01. Divided as floats, as jsonschema does, it is not; prices must not depend on that."""
    backend = default_backend(default_model_dir)
    for factor, multiples, others in (
        (0.01, (0, 0.01, 0.29, 19.99, 1.5, -0.07, 250), (0.001, 0.295, 19.999)),
        (0.1, (0.3, 0.7, 1.1, 12, -2.3), (0.35, 0.01)),
        (0.0001, (0.0075,), (0.00751,)),  # of JSON-Schema-Test-Suite
    ):
        spec = spec_of({"type": "number", "multipleOf": factor})
        assert [each for each in multiples if not passes(compiler, backend, spec, each)] == []
        assert [each for each in others if passes(compiler, backend, spec, each)] == []
    assert not jsonschema.Draft202012Validator({"multipleOf": 0.01}).is_valid(19.99)


@needs_public(MASKBENCH)
@pytest.mark.slow
def test_schemas_of_maskbench_let_every_valid_instance_through_and_no_invalid_one(
    compiler: LLGuidanceCompiler, default_model_dir: Path
) -> None:
    """Over a quarter of a second: 146 schemas with 468 instances."""
    backend = default_backend(default_model_dir)
    wrong: list[tuple[str, object]] = []
    refused: Counter[str] = Counter()
    counts: Counter[bool] = Counter()
    for line in (PUBLIC_DATA / MASKBENCH).read_text().splitlines():
        row = json.loads(line)
        spec = spec_of(row["schema"])
        try:
            compiler.matcher(spec)
        except GrammarError as error:
            refused[next(cause for cause in REFUSED if cause in str(error))] += 1
            continue
        for test in row["tests"]:
            counts[test["valid"]] += 1
            if passes(compiler, backend, spec, test["data"]) != test["valid"]:
                wrong.append((row["id"], test["data"]))
    assert wrong == []
    assert counts == {True: 195, False: 273}
    assert refused == REFUSED


@needs_public(JSON_SCHEMA_SUITE)
@pytest.mark.slow
def test_official_suite_lets_no_invalid_instance_through(compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    """Over a quarter of a second: 383 schemas with 1,299 instances. Schemas that are booleans, or need a refused keyword, are left out."""
    backend = default_backend(default_model_dir)
    num_schemas = num_invalid = 0
    unsound: list[tuple[str, str]] = []
    for file in sorted((PUBLIC_DATA / JSON_SCHEMA_SUITE).parent.glob("*.json")):
        for group in json.loads(file.read_text()):
            if not isinstance(group["schema"], dict):
                continue
            spec = spec_of(group["schema"])
            try:
                compiler.matcher(spec)
            except GrammarError:
                continue
            num_schemas += 1
            for test in group["tests"]:
                if not test["valid"]:
                    num_invalid += 1
                    if passes(compiler, backend, spec, test["data"]):
                        unsound.append((group["description"], test["description"]))
    assert unsound == []
    assert num_schemas > 100
    assert num_invalid > 200
