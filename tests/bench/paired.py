"""Compares the engine's speed in this checkout with that in another one.

Usage: python -m tests.bench.paired OTHER_CHECKOUT [--loads 24] [--pairs 1] [--workloads SINGLE B32 PREFILL] [--set quantization=int8]

Each checkout loads the default model in its own process, again for every load: where its memory lies makes a process faster or slower
than the next one of the same code, by up to a tenth. The two take turns with the same prompts, in alternating order, so that a drift of
the machine's speed affects both; a pair's ratio is this checkout's tokens per second over the other's, a load's is the mean of its
`--pairs`. The interval is the 95 % confidence interval of the mean over the loads (Student's t over the logarithms). Run it on an
otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import t as student_t
from tqdm import tqdm

from tests.bench.machine import hardware_line

REPOSITORY = Path(__file__).resolve().parents[2]
PAUSE_S = 0.05
"""Before each measurement: OpenMP's threads of the process that has just computed spin for some milliseconds."""
VOCABULARY = range(1_000, 40_000)
"""Ordinary tokens of the default model."""

WORKER = """
import json, sys, time
from replicas import LLM, SamplingParams
llm = LLM(enable_prefix_caching=False, **json.loads(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    task = json.loads(line)
    params = SamplingParams(temperature=0.0, max_tokens=task["max_tokens"], ignore_eos=True)
    start_s = time.perf_counter()
    llm.generate(task["prompts"], params, use_tqdm=False)
    print(time.perf_counter() - start_s, flush=True)
"""
"""Uses nothing but the offline API, which other checkouts have as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    num_prompts: int
    num_prompt_tokens: int
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens that tokens/s counts: the prompt's where a single token is generated."""
        return self.num_prompts * (self.num_prompt_tokens if self.max_tokens == 1 else self.max_tokens)

    def prompts(self, seed: int) -> list[list[int]]:
        """Prompts that no run has seen before; the same for both checkouts."""
        generator = random.Random(seed)
        return [[generator.choice(VOCABULARY) for _ in range(self.num_prompt_tokens)] for _ in range(self.num_prompts)]


WORKLOADS = {
    "SETTLE": Workload(num_prompts=1, num_prompt_tokens=32, max_tokens=32),
    "SINGLE": Workload(num_prompts=1, num_prompt_tokens=32, max_tokens=96),
    "B8": Workload(num_prompts=8, num_prompt_tokens=32, max_tokens=64),
    "B16": Workload(num_prompts=16, num_prompt_tokens=32, max_tokens=48),
    "B32": Workload(num_prompts=32, num_prompt_tokens=32, max_tokens=48),
    "PREFILL": Workload(num_prompts=1, num_prompt_tokens=1_500, max_tokens=1),
}


class EngineProcess:
    """Owns a process that loads an engine, says "ready", and then computes what it is asked for (WORKER)."""

    def __init__(self, name: str, command: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None) -> None:
        """Raises RuntimeError if the engine does not load."""
        self._process = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        if self._line() != "ready":
            raise RuntimeError(f"{name}: its engine did not load; its command is {shlex.join(command)}")

    def tokens_per_s(self, workload: Workload, seed: int) -> float:
        assert self._process.stdin is not None
        time.sleep(PAUSE_S)
        task = {"prompts": workload.prompts(seed), "max_tokens": workload.max_tokens}
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return workload.num_tokens / float(self._line())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.strip():
                return line.strip()
        return ""


class Checkout(EngineProcess):
    """This repository's engine as a checkout has it."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        python = str(REPOSITORY / ".venv" / "bin" / "python")
        super().__init__(str(folder), [python, "-c", WORKER, json.dumps(settings)], folder)


def interval_of(ratios: list[float]) -> tuple[float, float, float]:
    """Mean ratio (geometric), and the ends of its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, half = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs)) * float(student_t.ppf(0.975, len(logs) - 1))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def settings_of(pairs: Sequence[str]) -> dict[str, Any]:
    """Engine settings from KEY=VALUE."""
    return {key: _value(text) for key, text in (pair.split("=", 1) for pair in pairs)}


def _value(text: str) -> Any:
    """A number or a boolean where it is one, as YAML would read it."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.paired", description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--loads", type=int, default=24)
    parser.add_argument("--pairs", type=int, default=1, help="of each load")
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=["SINGLE", "B32", "PREFILL"])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="engine settings of both")
    options = parser.parse_args()
    settings = settings_of(options.set)
    print(hardware_line(os.cpu_count() or 1), settings or "", flush=True)
    loads = [
        measured_load(options.other, settings, load, options.pairs, options.workloads)
        for load in tqdm(range(options.loads), "loads", leave=False, disable=not sys.stderr.isatty())
    ]
    for name in options.workloads:
        pairs = [load[name] for load in loads]
        mean, low, high = interval_of([statistics.geometric_mean(ours / theirs for ours, theirs in load) for load in pairs])
        median = statistics.median(ours for load in pairs for ours, _ in load)
        print(f"{name}: {median:.1f} tokens/s, ratio {mean:.4f}, 95 % interval {low:.4f} to {high:.4f} ({len(pairs)} loads)", flush=True)
    return 0


def measured_load(
    other: Path, settings: dict[str, Any], load: int, num_pairs: int, workloads: Sequence[str]
) -> dict[str, list[tuple[float, float]]]:
    """Loads both checkouts; workload -> tokens/s here and there, of each pair."""
    folders = [REPOSITORY, other]
    first = load % 2
    checkouts: dict[int, Checkout] = {}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in workloads}
    try:
        for index in (first, 1 - first):
            checkouts[index] = Checkout(folders[index], settings)
        for name, pairs in found.items():
            for checkout in checkouts.values():
                checkout.tokens_per_s(WORKLOADS["SETTLE"], -1 - load)
            for pair in range(num_pairs):
                order = (0, 1) if (load + pair) % 2 == 0 else (1, 0)
                speeds = {index: checkouts[index].tokens_per_s(WORKLOADS[name], load * num_pairs + pair) for index in order}
                pairs.append((speeds[0], speeds[1]))
    finally:
        for checkout in checkouts.values():
            checkout.close()
    return found


if __name__ == "__main__":
    sys.exit(main())
