"""`make chaos`: injects faults into a cluster while it streams, and reports the streams as its clients saw them.

The exit status is 1 when tokens of a stream were lost, repeated or changed, or something was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from pathlib import Path

from tests.chaos import report
from tests.chaos.pool_scenarios import LAYOUT, NUM_PROMPT_REPEATS, POOL_SCENARIOS
from tests.chaos.scenarios import SCENARIOS, Round, Setting
from tests.chaos.served_cluster import Layout, ServedCluster
from tests.chaos.streams import golden_streams


async def run(cluster: ServedCluster, arguments: argparse.Namespace, path: Path) -> list[Round]:
    dice = random.Random(arguments.seed)
    await cluster.wait_ready()
    repeats = NUM_PROMPT_REPEATS if arguments.pools else 0
    golden = await golden_streams(cluster.url, arguments.streams, arguments.tokens, repeats)
    golden_long = [] if arguments.pools else await golden_streams(cluster.url, max(1, arguments.streams // 2), arguments.long_tokens)
    setting = Setting(cluster=cluster, dice=dice, golden=golden, golden_long=golden_long)
    rounds: list[Round] = []
    scenarios = POOL_SCENARIOS if arguments.pools else SCENARIOS
    for name in arguments.scenarios or scenarios:
        for number in range(arguments.rounds):
            try:
                await cluster.wait_ready()
                found = await scenarios[name](setting)
            except Exception as error:
                found = Round(scenario=name, faults=[f"the round itself failed: {error!r}"])
            rounds.append(found)
            pause_s = max(found.pauses_s, default=0.0)
            print(
                f"{time.strftime('%H:%M:%S')} {found.scenario} {number + 1}: {len(found.faults)} faults, longest pause {pause_s:.2f} s, "
                f"{found.duration_s:.0f} s",
                *found.faults[:5],
                sep="\n    ",
                flush=True,
            )
            report.write(rounds, path)
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="of each scenario")
    parser.add_argument("--pools", action="store_true", help="two prefill and two decode replicas, and the scenarios for them")
    parser.add_argument("--scenarios", nargs="+", choices=[*SCENARIOS, *POOL_SCENARIOS], help="all that fit when left out")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--long-tokens", type=int, default=2000, help="of the streams that a redeploy must outlive")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("build/chaos"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a cluster must not be left behind
    folder = arguments.folder.resolve()
    with ServedCluster(folder, LAYOUT if arguments.pools else Layout()) as cluster:
        rounds = asyncio.run(run(cluster, arguments, folder / ("pools.json" if arguments.pools else "report.json")))
    print(report.table(rounds))
    return int(any(each.faults for each in rounds))


if __name__ == "__main__":
    sys.exit(main())
