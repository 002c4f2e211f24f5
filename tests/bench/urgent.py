"""Measures urgent prompts beside a backlog: `python -m tests.bench.urgent [--rounds 5] [--set quantization=int8]`.

In each round the same five urgent prompts of 170 tokens come three times, in changing order: to an idle engine; beside 64 less urgent
requests that decode and 50 that wait, with the defaults; and beside the same backlog with `max_urgent_share: 0`, where every step decodes
all of them. Printed are the times to first token of the five, and what the backlog loses: its tokens in the seconds after the urgent
prompts came, and its longest gap between two tokens. Run it on an otherwise idle machine. `--quick` tests the bench itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.request import GenerationRequest, RequestKey
from replicas.sampling_params import SamplingParams
from tests.bench.machine import hardware_line
from tests.bench.paired import VOCABULARY

URGENT, LESS_URGENT = 0, 10
NUM_URGENT_TOKENS, NUM_BACKLOG_TOKENS = 170, 32
SETTLING_S = 1.0
"""Time for which the whole backlog decodes before the urgent prompts come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What meets in one run."""

    num_urgent: int = 5
    num_decoding: int = 64
    num_waiting: int = 50
    watched_s: float = 10.0
    """Time after the urgent prompts for which the backlog's tokens are counted."""


QUICK = Load(num_urgent=2, num_decoding=8, num_waiting=2, watched_s=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One arrival of the urgent prompts."""

    ttfts_s: list[float]
    backlog_tokens_per_s: float = 0.0
    """From the arrival on."""
    backlog_tokens_per_s_before: float = 0.0
    longest_gap_s: float = 0.0
    """Of all streams of the backlog, from the arrival on; a preempted stream's wait for a slot is not counted."""
    num_preemptions: int = 0


class Clients:
    """Owns the arrival times of tokens. Steps the engine itself, so that nothing stands between a step and its time."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._generator = random.Random(seed)
        self.token_times_s: dict[RequestKey, list[float]] = {}
        self._num = 0

    def submit(self, num: int, num_tokens: int, *, priority: int, max_tokens: int) -> list[RequestKey]:
        keys = []
        for _ in range(num):
            self._num += 1
            request = GenerationRequest(
                request_id=f"r{self._num}",
                prompt_ids=tuple(self._generator.choice(VOCABULARY) for _ in range(num_tokens)),
                params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
                seed=0,
                priority=priority,
            )
            self._engine.add_request(request)
            self.token_times_s[request.key] = []
            keys.append(request.key)
        return keys

    def step(self) -> None:
        output = self._engine.step()
        now_s = time.perf_counter()
        for progress in output.progress:
            self.token_times_s[progress.key] += [now_s] * len(progress.token_ids)

    def cancel_all(self) -> None:
        for key in self.token_times_s:
            self._engine.cancel(key)
        while self._engine.has_work:
            self._engine.step()


def measure_idle(engine: Engine, load: Load, seed: int) -> Run:
    clients = Clients(engine, seed)
    start_s = time.perf_counter()
    keys = clients.submit(load.num_urgent, NUM_URGENT_TOKENS, priority=URGENT, max_tokens=32)
    while not all(clients.token_times_s[key] for key in keys):
        clients.step()
    clients.cancel_all()
    return Run(ttfts_s=[clients.token_times_s[key][0] - start_s for key in keys])


def measure_beside(engine: Engine, load: Load, seed: int) -> Run:
    clients = Clients(engine, seed)
    backlog = clients.submit(load.num_decoding + load.num_waiting, NUM_BACKLOG_TOKENS, priority=LESS_URGENT, max_tokens=1_000)
    decoding = backlog[: load.num_decoding]
    while not all(clients.token_times_s[key] for key in decoding):
        clients.step()
    settled_s = time.perf_counter()
    while time.perf_counter() - settled_s < SETTLING_S:
        clients.step()
    start_s = time.perf_counter()
    num_preemptions = engine.stats().num_preemptions
    urgent = clients.submit(load.num_urgent, NUM_URGENT_TOKENS, priority=URGENT, max_tokens=32)
    while time.perf_counter() - start_s < load.watched_s or not all(clients.token_times_s[key] for key in urgent):
        clients.step()
    end_s = time.perf_counter()
    running = {state.key for state in engine.scheduler.running if state.num_preemptions == 0}
    times_s = [clients.token_times_s[key] for key in decoding]
    gaps_s = [
        later - earlier
        for key in decoding
        if key in running
        for earlier, later in itertools.pairwise(clients.token_times_s[key])
        if later > start_s
    ]
    run = Run(
        ttfts_s=[clients.token_times_s[key][0] - start_s for key in urgent],
        backlog_tokens_per_s=sum(time_s > start_s for stream in times_s for time_s in stream) / (end_s - start_s),
        backlog_tokens_per_s_before=sum(settled_s < time_s <= start_s for stream in times_s for time_s in stream) / (start_s - settled_s),
        longest_gap_s=max(gaps_s, default=0.0),
        num_preemptions=engine.stats().num_preemptions - num_preemptions,
    )
    clients.cancel_all()
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of `EngineConfig`, as JSON or text")
    parser.add_argument("--output", type=Path, help="write all runs here, as JSON")
    parser.add_argument("--quick", action="store_true", help="a round with a small load, to test the bench")
    options = parser.parse_args(arguments)
    load = QUICK if options.quick else Load()
    num_rounds = 1 if options.quick else options.rounds
    config = EngineConfig(max_num_seqs=load.num_decoding, **dict(map(_setting, options.set)))
    engines = {"default": load_engine(config), "share 0": load_engine(replace(config, max_urgent_share=0.0))}
    measures = {
        "idle": lambda seed: measure_idle(engines["default"], load, seed),
        "beside": lambda seed: measure_beside(engines["default"], load, seed),
        "beside, share 0": lambda seed: measure_beside(engines["share 0"], load, seed),
    }
    runs: dict[str, list[Run]] = {name: [] for name in measures}
    names = list(measures)
    for number in range(-1, num_rounds):  # the first round warms up
        for name in names:
            if number < 0 and options.quick:
                continue
            run = measures[name](number)
            if number >= 0:
                runs[name].append(run)
        names = names[1:] + names[:1]
    print(hardware_line(os.cpu_count() or 1))
    print(f"load average {os.getloadavg()[0]:.2f}; medians of {num_rounds} rounds")
    print(f"{'':16} {'first':>7} {'last':>7} {'mean':>7}  backlog tokens/s (before)  longest gap  preempted")
    idle_s = statistics.median(max(run.ttfts_s) for run in runs["idle"])
    for name, found in runs.items():
        first_s, last_s, mean_s = (statistics.median(f(run.ttfts_s) for run in found) for f in (min, max, statistics.fmean))
        line = f"{name:16} {first_s:6.2f}s {last_s:6.2f}s {mean_s:6.2f}s"
        if name != "idle":
            line += (
                f"  {statistics.median(run.backlog_tokens_per_s for run in found):8.1f}"
                f" ({statistics.median(run.backlog_tokens_per_s_before for run in found):.1f})"
                f"  {statistics.median(run.longest_gap_s for run in found):6.2f}s  {found[0].num_preemptions}"
                f"  last TTFT {last_s / idle_s:.2f} times idle"
            )
        print(line)
    if options.output is not None:
        options.output.write_text(json.dumps({name: [asdict(run) for run in found] for name, found in runs.items()}, indent=1))
    return 0


def _setting(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


if __name__ == "__main__":
    raise SystemExit(main())
