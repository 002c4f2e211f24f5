"""What masks, tokens and compiles of grammars cost, by size of the vocabulary. For a quiet machine; needs no engine.

    python -m tests.bench.grammar_masks [--rounds 5]

The vocabularies of 128k and 256k tokens are the default model's with made-up longer tokens behind it (`larger_vocabulary`).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from statistics import quantiles
from typing import Any

import numpy as np

from replicas.grammar.llguidance_compiler import LLGuidanceCompiler
from replicas.grammar_spec import GrammarKind, GrammarSpec
from replicas.model.default_model import prepare_default_model
from tests.data_paths import MASKBENCH, OWN_DATA, PUBLIC_DATA, has_public

SIZES = (49_152, 131_072, 262_144)
EOS = 2
MOST_TOKENS = 200


def larger_vocabulary(tokenizer_json: str, num_tokens: int) -> str:
    """The tokenizer with merges of random pairs of its tokens, up to `num_tokens`."""
    state = json.loads(tokenizer_json)
    vocab: dict[str, int] = state["model"]["vocab"]
    special = {token["content"] for token in state["added_tokens"]}
    ordinary = [token for token in vocab if token not in special]
    draw = random.Random(0)
    while len(vocab) < num_tokens:
        left, right = draw.choice(ordinary), draw.choice(ordinary)
        if left + right not in vocab and len(left + right) <= 24:
            vocab[left + right] = len(vocab)
            state["model"]["merges"].append([left, right])
    return json.dumps(state)


def schemas() -> list[dict[str, Any]]:
    if has_public(MASKBENCH):
        return [json.loads(line)["schema"] for line in (PUBLIC_DATA / MASKBENCH).read_text().splitlines()]
    return [json.loads(line)["schema"] for line in (OWN_DATA / "json_schemas.jsonl").read_text().splitlines()]


class Times:
    """Seconds of one kind of call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._seconds: list[float] = []

    def measure(self, call: Callable[[], Any]) -> Any:
        start_s = time.perf_counter()
        result = call()
        self._seconds.append(time.perf_counter() - start_s)
        return result

    def line(self) -> str:
        cuts = quantiles(self._seconds, n=100, method="inclusive")
        p50, p99, most = 1e6 * cuts[49], 1e6 * cuts[98], 1e6 * max(self._seconds)
        return f"{self.name:26} n {len(self._seconds):7}  p50 {p50:9.1f}  p99 {p99:9.1f}  max {most:9.1f} us"


def measure(tokenizer_json: str, num_rows: int, rounds: int) -> list[Times]:
    start_s = time.perf_counter()
    compiler = LLGuidanceCompiler(tokenizer_json, num_rows, {EOS}, max_cached=512)
    compiler.matcher(GrammarSpec(kind=GrammarKind.JSON_OBJECT))
    print(f"{num_rows} tokens: vocabulary read in {time.perf_counter() - start_s:.2f} s")
    compiled, cached = Times("compile and first mask"), Times("matcher, cached")
    first, masks, ending = Times("first mask of a matcher"), Times("mask"), Times("mask near max_tokens")
    accepts, forced, back = Times("accept"), Times("forced tokens"), Times("roll back 5, accept 5")
    row = np.zeros((num_rows + 31) // 32, dtype=np.int32)
    for schema in schemas():
        spec = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))
        try:
            compiled.measure(lambda spec=spec: compiler.matcher(spec))
        except ValueError:
            continue
        for seed in range(rounds):
            draw = random.Random(seed)
            matcher = cached.measure(lambda spec=spec: compiler.matcher(spec, max_tokens=MOST_TOKENS))
            ids: list[int] = []
            while len(ids) < MOST_TOKENS and not matcher.must_end:
                kind = first if not ids else masks if len(ids) < 0.75 * MOST_TOKENS else ending
                kind.measure(lambda matcher=matcher: matcher.fill(row))
                allowed = np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0]
                token_id = int(draw.choice(allowed))
                if token_id == EOS:
                    break
                forced.measure(matcher.forced_tokens)
                accepts.measure(lambda matcher=matcher, token_id=token_id: matcher.accept(token_id))
                ids.append(token_id)
                if len(ids) % 25 == 0:
                    back.measure(lambda matcher=matcher, last=ids[-5:]: (matcher.rollback(5), matcher.accept_all(last)))
    compiler.close()
    return [compiled, cached, first, masks, ending, accepts, forced, back]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="random answers per schema")
    options = parser.parse_args()
    own = (prepare_default_model() / "tokenizer.json").read_text()
    for num_rows in SIZES:
        for times in measure(own if num_rows == SIZES[0] else larger_vocabulary(own, num_rows), num_rows, options.rounds):
            print("  ", times.line())


if __name__ == "__main__":
    main()
