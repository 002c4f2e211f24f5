"""Compares two unified replicas with one prefill and one decode replica, under chats and long prompts: `python -m tests.bench.pools_live`.

Both get the same arrivals from one seed: chats (a short prompt, 64 tokens) at random times, and a long prompt (16 tokens) every few
seconds. The modes run one after the other, each in its own cluster with one thread per replica. In `pairs` the router sends every
request to a pair; in `disaggregated` it decides by cost, as deployed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import httpx

from tests.bench.machine import hardware_line
from tests.chaos.served_cluster import Layout, ServedCluster
from tests.chaos.streams import Stream

CHAT_TOKENS, LONG_TOKENS = 64, 16
LONG_REPEATS = 100
"""Of a sentence of about a dozen tokens."""
POOLS = Layout(num_gateways=1, is_default_model=True, pools={"prefill": 1, "decode": 1})
LAYOUTS = {
    "unified": Layout(num_replicas=2, num_gateways=1, is_default_model=True),
    "disaggregated": POOLS,
    "pairs": replace(POOLS, router={"policy": "round_robin"}),
}


@dataclass(slots=True)
class Outcome:
    """Seconds."""

    chat_ttft_s: list[float] = field(default_factory=list)
    chat_tpot_s: list[float] = field(default_factory=list)
    chat_gaps_s: list[float] = field(default_factory=list)
    long_ttft_s: list[float] = field(default_factory=list)

    def row(self, mode: str) -> str:
        figures = [
            (self.chat_ttft_s, 0.5), (self.chat_ttft_s, 0.9), (self.chat_tpot_s, 0.5), (self.chat_tpot_s, 0.9),
            (self.chat_gaps_s, 0.99), (self.long_ttft_s, 0.5),
        ]  # fmt: skip
        return f"| {mode} | " + " | ".join(f"{1000 * _quantile(values, q):.0f}" for values, q in figures) + f" | {len(self.chat_ttft_s)} |"


async def measure(cluster: ServedCluster, arguments: argparse.Namespace) -> Outcome:
    """Raises RuntimeError when an answer fails."""
    await cluster.wait_ready(300.0)
    dice = random.Random(arguments.seed)
    arrivals = [(at_s, False) for at_s in _poisson(dice, arguments.rate, arguments.seconds)]
    arrivals += [(at_s, True) for at_s in _poisson(dice, 1 / arguments.long_every_s, arguments.seconds)]
    streams: list[tuple[Stream, bool]] = []
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as http:
        await Stream(index=0, max_tokens=8).run(http, cluster.url)  # the first one loads modules
        start_s = time.monotonic()
        tasks: list[asyncio.Task[Stream]] = []
        for number, (at_s, is_long) in enumerate(sorted(arrivals), start=1):
            await asyncio.sleep(max(0.0, start_s + at_s - time.monotonic()))
            num_tokens, num_repeats = (LONG_TOKENS, LONG_REPEATS) if is_long else (CHAT_TOKENS, 1)
            stream = Stream(index=number, max_tokens=num_tokens, num_prompt_repeats=num_repeats)
            streams.append((stream, is_long))
            tasks.append(asyncio.create_task(stream.run(http, cluster.url)))
        await asyncio.gather(*tasks)
    outcome = Outcome()
    for stream, is_long in streams:
        if stream.error is not None or not stream.arrivals_s:
            raise RuntimeError(f"request {stream.index}: {stream.error}")
        ttft_s = stream.arrivals_s[0] - stream.sent_s
        if is_long:
            outcome.long_ttft_s.append(ttft_s)
            continue
        outcome.chat_ttft_s.append(ttft_s)
        outcome.chat_tpot_s.append((stream.arrivals_s[-1] - stream.arrivals_s[0]) / (CHAT_TOKENS - 1))
        outcome.chat_gaps_s += [later - earlier for earlier, later in pairwise(stream.arrivals_s)]
    return outcome


def _poisson(dice: random.Random, rate: float, seconds: float) -> list[float]:
    times: list[float] = []
    while (at_s := (times[-1] if times else 0.0) + dice.expovariate(rate)) < seconds:
        times.append(at_s)
    return times


def _quantile(values: list[float], q: float) -> float:
    return median(values) if q == 0.5 else sorted(values)[min(len(values) - 1, int(q * len(values)))]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.pools_live", description=__doc__)
    parser.add_argument("--modes", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=1.0, help="chats a second")
    parser.add_argument("--long-every-s", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("build/pools_live"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a cluster must not be left behind
    rows = []
    for mode in arguments.modes:
        with ServedCluster(arguments.folder.resolve() / mode, LAYOUTS[mode]) as cluster:
            rows.append(asyncio.run(measure(cluster, arguments)).row(mode))
    print(hardware_line(2))
    print(f"{arguments.rate} chats a second, a prompt of about 1,200 tokens every {arguments.long_every_s} s, {arguments.seconds} s; ms")
    print("| mode | chat TTFT p50 | p90 | chat TPOT p50 | p90 | chat gap p99 | long TTFT p50 | chats |\n|---|---|---|---|---|---|---|---|")
    print(*rows, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
