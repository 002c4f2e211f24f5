"""Thousands of made-up grammars and every known bomb, through the processes that check them at the edge.

    python -m tests.chaos.grammar_fuzz [--num 3000] [--seed 0] [--tenants 8]

Fails if one is answered by anything but a grammar, a refusal or a request to retry, or not within 3 seconds, or if processes or memory
are left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter

import psutil

from cluster.failures import Unavailable
from cluster.grammar.check_pool import GrammarCheckPool
from replicas.grammar.compiler import GrammarError
from replicas.grammar_spec import GrammarSpec
from tests.grammar_bombs import BOMBS
from tests.grammar_fuzz import fuzzed_spec

MOST_S = 3.0
MOST_LEFT_BYTES = 512 << 20


class Fuzzer:
    """Owns the counts of one run."""

    def __init__(self, pool: GrammarCheckPool) -> None:
        self._pool = pool
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.slowest: list[tuple[float, str]] = []
        self.faults: list[str] = []

    async def try_one(self, name: str, spec: GrammarSpec, tenant: str, drops_unsupported: bool) -> None:
        start_s = time.perf_counter()
        try:
            checked = await self._pool.admit(spec, tenant=tenant, drops_unsupported=drops_unsupported)
            outcome = "reduced" if checked.dropped else "accepted"
        except GrammarError as error:
            outcome = "refused"
            self.reasons[str(error).split(":")[-1].strip()[:40]] += 1
            if "\n" in str(error) or not str(error):
                self.faults.append(f"{name}: the reason is not one line: {error!r}")
        except Unavailable:
            outcome = "busy"
        except Exception as error:
            outcome = "fault"
            self.faults.append(f"{name}: {error!r}")
        seconds = time.perf_counter() - start_s
        self.outcomes[outcome] += 1
        self.slowest = sorted([*self.slowest, (seconds, name)], reverse=True)[:5]
        if seconds > MOST_S:
            self.faults.append(f"{name}: answered after {seconds:.1f} s")


async def run(num: int, seed: int, num_tenants: int) -> int:
    pool = GrammarCheckPool()
    pool.warm_up()
    fuzzer = Fuzzer(pool)
    draw = random.Random(seed)
    lines = [(f"fuzz {number}", fuzzed_spec(draw)) for number in range(num)]
    bombs = [(f"bomb {name}", spec) for name, spec in BOMBS.items()]
    for place, bomb in enumerate(bombs):  # spread through the run
        lines.insert((place + 1) * len(lines) // (len(bombs) + 1), bomb)

    async def follow(tenant: int) -> None:
        for name, spec in lines[tenant::num_tenants]:
            await fuzzer.try_one(name, spec, f"tenant {tenant}", drops_unsupported=len(name) % 2 == 0)

    async with asyncio.TaskGroup() as group:
        for tenant in range(num_tenants):
            group.create_task(follow(tenant))
    await asyncio.sleep(1)
    children = psutil.Process().children()
    left_bytes = sum(child.memory_info().rss for child in children)
    print(f"{dict(fuzzer.outcomes)}, {len(children)} processes with {left_bytes >> 20} MiB left")
    print("slowest:", ", ".join(f"{name} {seconds:.2f} s" for seconds, name in fuzzer.slowest))
    print("reasons:", fuzzer.reasons.most_common(12))
    if left_bytes > MOST_LEFT_BYTES:
        fuzzer.faults.append(f"{left_bytes >> 20} MiB are left in check processes")
    await pool.close()
    if psutil.Process().children():
        fuzzer.faults.append("processes are left")
    for fault in fuzzer.faults:
        print("FAULT", fault)
    return len(fuzzer.faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tenants", type=int, default=8)
    options = parser.parse_args()
    raise SystemExit(min(1, asyncio.run(run(options.num, options.seed, options.tenants))))


if __name__ == "__main__":
    main()
