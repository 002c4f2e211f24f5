"""Measures how much an engine loses to other processes that keep cores busy, in this checkout and optionally in another one.

Usage: python -m tests.bench.neighbours [OTHER_CHECKOUT] [--rounds 5] [--neighbours 0 1 2] [--workloads SINGLE B16] [--set K=V]
       [--peers openvino vllm_cpu]

Each neighbour is an endless loop in a session of its own. Every round runs each workload beside each number of neighbours, the checkouts
in turns, each after a moment to settle, and the peers after them; the table has the median tokens/s and its share of the quiet
machine's. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from tests.bench.machine import hardware_line
from tests.bench.paired import REPOSITORY, WORKLOADS, Checkout, EngineProcess, settings_of
from tests.bench.peers import PAIRED_PEERS, peer_process


@contextmanager
def neighbours(num: int) -> Iterator[None]:
    """Keeps `num` cores busy, as far as the scheduler gives them away."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(num)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.neighbours", description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=["SINGLE", "B16"])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="engine settings of both")
    parser.add_argument("--peers", nargs="*", choices=PAIRED_PEERS, default=[])
    options = parser.parse_args()
    settings = settings_of(options.set)
    print(hardware_line(os.cpu_count() or 1), settings or "", flush=True)
    engines: dict[str, EngineProcess] = {}
    found: dict[tuple[str, str, int], list[float]] = {}
    try:
        for folder in filter(None, (REPOSITORY, options.other)):
            engines[folder.name] = Checkout(folder, settings)
        for name in options.peers:
            engines[name] = peer_process(name, os.cpu_count() or 1)
        for index in tqdm(range(options.rounds + 1), "rounds", leave=False, disable=not sys.stderr.isatty()):
            for num in options.neighbours:
                with neighbours(num):
                    for name in options.workloads:
                        for engine, process in engines.items():
                            process.tokens_per_s(WORKLOADS["SETTLE"], seed=index)
                            speed = process.tokens_per_s(WORKLOADS[name], seed=index)
                            if index > 0:  # the first round warms up
                                found.setdefault((name, engine, num), []).append(speed)
    finally:
        for process in engines.values():
            process.close()
    for name in options.workloads:
        for engine in engines:
            medians = {num: statistics.median(found[name, engine, num]) for num in options.neighbours}
            quiet = medians[options.neighbours[0]]
            cells = (f"{num} neighbours {speed:.1f} ({speed / quiet:.0%})" for num, speed in medians.items())
            print(f"{name} {engine}: {', '.join(cells)} tokens/s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
