"""Answers of the default model under every schema that is not refused: are they valid, and do they end?

    python -m tests.bench.grammar_answers [--seeds 3] [--max-tokens 512] [--limit N] [--model FOLDER]

Temperature 1. Fails if an answer that ends with `stop` is not valid (jsonschema, formats on), if one fails, or if fewer than 90 % end.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from decimal import Decimal
from typing import Any

import jsonschema

from replicas import LLM, SamplingParams
from replicas.grammar.checking.checks import GrammarChecker
from replicas.grammar.compiler import GrammarError
from replicas.grammar_spec import GrammarKind, GrammarSpec
from tests.data_paths import MASKBENCH, OWN_DATA, PUBLIC_DATA, has_public

LEAST_ENDED = 0.9
ASK = "Give one example of a JSON document that follows this JSON schema.\n"
MAX_PROMPT_CHARS = 2_000


def schemas(limit: int | None) -> list[tuple[str, dict[str, Any]]]:
    if has_public(MASKBENCH):
        rows = [json.loads(line) for line in (PUBLIC_DATA / MASKBENCH).read_text().splitlines()]
        named = [(row["id"], row["schema"]) for row in rows]
    else:
        rows = [json.loads(line) for line in (OWN_DATA / "json_schemas.jsonl").read_text().splitlines()]
        named = [(row["name"], row["schema"]) for row in rows]
    step = 1 if limit is None else max(1, len(named) // limit)
    return named[::step]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--limit", type=int, default=None, help="about so many schemas, evenly chosen")
    parser.add_argument("--model", default=None)
    options = parser.parse_args()
    checker = GrammarChecker()
    names: list[str] = []
    validators: list[Any] = []
    conversations: list[Any] = []
    params: list[SamplingParams] = []
    num_refused = 0
    for name, schema in schemas(options.limit):
        spec = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))
        try:
            checker.checked(spec)
        except GrammarError:
            num_refused += 1
            continue
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        for seed in range(options.seeds):
            names.append(name)
            exact = json.loads(spec.text, parse_float=Decimal)  # in floats, 17.56 is no multiple of 0.01
            validators.append(kind(exact, format_checker=kind.FORMAT_CHECKER))
            conversations.append([{"role": "user", "content": ASK + json.dumps(schema)[:MAX_PROMPT_CHARS]}])
            params.append(SamplingParams(max_tokens=options.max_tokens, temperature=1.0, seed=seed, grammar=spec))
    with LLM(options.model) as llm:
        outputs = llm.chat(conversations, params)
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    unfinished: Counter[str] = Counter()
    for name, validator, output in zip(names, validators, outputs, strict=True):
        answer = output.outputs[0]
        ends[answer.finish_reason.value] += 1
        if answer.finish_reason.value == "stop":
            try:
                validator.validate(json.loads(answer.text, parse_float=Decimal))
            except (ValueError, jsonschema.ValidationError) as error:
                wrong.append(f"{name}: {str(error).splitlines()[0]}: {answer.text[:200]}")
        else:
            unfinished[name] += 1
            if answer.error:
                wrong.append(f"{name}: {answer.error}")
    ended = ends["stop"] / len(names)
    lengths = sorted(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{len(names)} answers to {len(set(names))} schemas ({num_refused} refused): {dict(ends)}, {ended:.1%} ended")
    print(f"tokens: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}; not ended: {unfinished.most_common(20)}")
    for line in wrong:
        print("WRONG", line)
    raise SystemExit(1 if wrong or ended < LEAST_ENDED else 0)


if __name__ == "__main__":
    main()
