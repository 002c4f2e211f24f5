"""What grammars cost one engine: rows of a JSON schema against free rows, with and without forced tokens, in interleaved pairs.

Each pair is two batches of the same prompts. A free row generates about as many tokens as its constrained twin, so tokens/s compare.

    .venv/bin/python -m tests.bench.grammar_cost --rows 16 --pairs 20

Run it on a machine that does nothing else. Prints medians of the ratios (constrained / free) with their quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import replicas.scheduling.new_tokens as new_tokens
from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.grammar_spec import GrammarKind, GrammarSpec
from replicas.request import GenerationRequest
from replicas.sampling_params import SamplingParams

KEYS = [
    "customer_reference_number", "preferred_contact_method", "delivery_street_address", "delivery_postal_code", "estimated_delivery_days",
    "total_amount_in_cents", "is_returning_customer", "internal_processing_notes",
]  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        KEYS[0]: {"type": "integer", "minimum": 100_000, "maximum": 999_999},
        KEYS[1]: {"enum": ["electronic mail", "telephone", "text message"]},
        KEYS[2]: {"type": "string", "minLength": 20, "maxLength": 40},
        KEYS[3]: {"type": "string", "pattern": "^[0-9]{5}$"},
        KEYS[4]: {"type": "integer", "minimum": 1, "maximum": 30},
        KEYS[5]: {"type": "integer", "minimum": 100, "maximum": 99_999},
        KEYS[6]: {"type": "boolean"},
        KEYS[7]: {"type": "string", "minLength": 40, "maxLength": 80},
    },
    "required": KEYS,
    "additionalProperties": False,
}
GRAMMAR = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(SCHEMA))
FORCED = new_tokens.MAX_FORCED_TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a folder or id; the default model if left out")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    engine = load_engine(EngineConfig(model=options.model, max_model_len=1024, max_num_seqs=options.rows, num_threads=options.threads))
    params = SamplingParams(max_tokens=400, temperature=options.temperature, grammar=GRAMMAR)
    bench = Bench(engine, options.rows)
    bench.run(params, "warm", [400] * options.rows)
    print(f"{engine.description.runner}, {options.rows} rows, temperature {options.temperature}, {options.pairs} pairs")
    for name, most_forced in (("masks alone", 0), ("with forced tokens", FORCED)):
        new_tokens.MAX_FORCED_TOKENS = most_forced
        before = engine.stats().grammars
        ratios = [bench.pair(params, f"{name}-{number}", is_free_first=number % 2 == 0) for number in range(options.pairs)]
        after = engine.stats().grammars
        low, middle, high = statistics.quantiles(ratios, n=4)
        num_masks = after.num_masks - before.num_masks
        mask_us = 1e6 * (after.mask_s - before.mask_s) / max(1, num_masks)
        num_forced = after.num_forced_tokens - before.num_forced_tokens
        print(f"{name}: {middle:.3f}x of free tokens/s ({low:.3f} to {high:.3f}); {num_forced} tokens forced; {mask_us:.0f} us a mask")
    engine.close()


class Bench:
    """Runs batches to their end and counts."""

    def __init__(self, engine: Engine, num_rows: int) -> None:
        self._engine = engine
        self._num_rows = num_rows

    def pair(self, params: SamplingParams, name: str, *, is_free_first: bool) -> float:
        """Tokens/s of constrained rows divided by those of free rows, which have the lengths of an earlier constrained run."""
        _, lengths = self.run(params, f"{name}-lengths", [400] * self._num_rows)  # also warms what both need
        free = replace(params, grammar=None, ignore_eos=True)
        order = [(free, "free"), (params, "constrained")]
        rates = {}
        for one, what in order if is_free_first else reversed(order):
            seconds, found = self.run(one, f"{name}-{what}", lengths)
            rates[what] = sum(found) / seconds
        return rates["constrained"] / rates["free"]

    def run(self, params: SamplingParams, name: str, lengths: Sequence[int]) -> tuple[float, list[int]]:
        """Seconds from the first step to the last, and the tokens of each row. The seeds are those of the rows' numbers."""
        counts = dict.fromkeys((f"{name}-{row}" for row in range(self._num_rows)), 0)
        for row, request_id in enumerate(counts):
            one = params if params.grammar is not None else replace(params, max_tokens=lengths[row])
            prompt = tuple(1000 + 37 * row + place for place in range(24))
            self._engine.add_request(GenerationRequest(request_id=request_id, prompt_ids=prompt, params=one, seed=row))
        start_s = time.perf_counter()
        while self._engine.has_work:
            for item in self._engine.step().progress:
                counts[item.key.request_id] += len(item.token_ids)
        return time.perf_counter() - start_s, list(counts.values())


if __name__ == "__main__":
    main()
