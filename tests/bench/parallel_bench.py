"""Measures the step time of one model over 1, 2, ... ranks of this machine, and the share that ranks spend on communication.

    python -m tests.bench.parallel_bench [--model FOLDER] [--sizes 1 2] [--runner native] [--dtype bfloat16]

All ranks share the same cores: the sizes are compared on equal hardware, so more ranks gain nothing here. The figures show the
price of dividing: collectives (including waits for the slower rank) and the step message, as measured on rank 0.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass

from replicas.attention.step_tensors import StepTensors
from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.ranks.step_message import encode_step
from replicas.sampling_params import SamplingParams
from tests.bench.machine import hardware_line
from tests.engine_harness import requests_for

NUM_STEPS = 20
PROMPT_TOKENS = 64
BATCHES = (1, 8, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians over the steps, in milliseconds; bytes of the step message."""

    name: str
    step_ms: float
    forward_ms: float
    collectives_ms: float
    message_ms: float
    message_bytes: int


class _Watch:
    """Stands before the engine's runner and notes what each forward pass costs."""

    def __init__(self, engine: Engine) -> None:
        self._runner, self._leader = engine._runner, engine._leader
        self.rows: list[tuple[float, float, float, int]] = []
        engine._runner = self

    def forward(self, step: StepTensors) -> object:
        before = self._counters()
        start_s = time.perf_counter()
        result = self._runner.forward(step)
        forward_s = time.perf_counter() - start_s
        after = self._counters()
        self.rows.append((forward_s, after[0] - before[0], after[1] - before[1], len(encode_step(step.arrays))))
        return result

    def _counters(self) -> tuple[float, float]:
        return (0.0, 0.0) if self._leader is None else (self._leader.group.seconds, self._leader.message_seconds)


def _measure(engine: Engine, name: str, prompts: list[list[int]], num_steps: int, watch: _Watch, *, is_prefill: bool) -> Row:
    params = SamplingParams(temperature=0.0, max_tokens=1 if is_prefill else num_steps + 8, ignore_eos=True)
    requests = requests_for(prompts, params, prefix=name)
    if not is_prefill:
        for request in requests:
            engine.add_request(request)
        while any(state.num_uncomputed_tokens > 1 for state in engine.scheduler.running) or engine.scheduler.waiting:
            engine.step()
    watch.rows.clear()
    step_ms = []
    if is_prefill:
        for request in requests:
            engine.add_request(request)
            step_ms += _timed_steps(engine, 1)
    else:
        step_ms = _timed_steps(engine, num_steps)
        for request in requests:
            engine.cancel(request.key)
        engine.step()
    rows = watch.rows[: len(step_ms)]
    return Row(
        name=name,
        step_ms=statistics.median(step_ms),
        forward_ms=1e3 * statistics.median(row[0] for row in rows),
        collectives_ms=1e3 * statistics.median(row[1] for row in rows),
        message_ms=1e3 * statistics.median(row[2] for row in rows),
        message_bytes=rows[-1][3],
    )


def _timed_steps(engine: Engine, num_steps: int) -> list[float]:
    times = []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - start_s))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.parallel_bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder; the default model otherwise")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runner", default="auto")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    sys.stdout.write(f"{hardware_line(len(os.sched_getaffinity(0)))}\n")
    sys.stdout.write("| ranks | threads each | step | ms | collectives | step message |\n|---|---|---|---|---|---|\n")
    runners = {}  # runner and variant of its kernels, in the order of the sizes
    for size in options.sizes:
        config = EngineConfig(
            model=options.model, tensor_parallel_size=size, runner=options.runner, dtype=options.dtype, enable_prefix_caching=False,
            max_num_batched_tokens=512, max_model_len=1024, num_threads=max(1, len(os.sched_getaffinity(0)) // size),
        )  # fmt: skip
        engine = load_engine(config)
        try:
            watch = _Watch(engine)
            runners[f"{engine.description.runner} {engine.description.kernels}".strip()] = None
            vocab_size = engine.description.vocab_size
            prompts = [[(7919 * i + 31 * row + 13) % vocab_size for i in range(PROMPT_TOKENS)] for row in range(max(BATCHES))]
            long = [[(7919 * i + 31 * row + 17) % vocab_size for i in range(512)] for row in range(8)]
            rows = [_measure(engine, f"decode of {b}", prompts[:b], NUM_STEPS, watch, is_prefill=False) for b in BATCHES]
            rows.append(_measure(engine, "prefill of 512", long, 1, watch, is_prefill=True))
            for row in rows:
                sys.stdout.write(
                    f"| {size} | {config.num_threads} | {row.name} | {row.step_ms:.1f} | {row.collectives_ms:.2f} ms "
                    f"({row.collectives_ms / row.step_ms:.0%}) | {row.message_bytes} bytes, {row.message_ms:.3f} ms "
                    f"({row.message_ms / row.step_ms:.1%}) |\n"
                )
            sys.stdout.flush()
        finally:
            engine.close()
    sys.stdout.write(f"\nRunner: {', '.join(runners)}.\n")


if __name__ == "__main__":
    main()
