"""`make soak`: minutes of mixed load, and checks of memory and KV blocks afterwards.

Clients come and go, share prefixes or not, stream or not, and some disconnect. Every ten seconds the private memory of each process is
read. The exit status is 1 when memory grows, an answer fails, or a block stays held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.chaos.served_cluster import GATEWAY, MODEL, REPLICA, ROUTER, Layout, ServedCluster

SAMPLE_S = 10.0
WARM_UP_SHARE = 0.25
"""Of the time, in which caches fill, arenas grow and modules load: not judged."""
MAX_GROWTH_SHARE = 0.03
MIN_GROWTH_BYTES = 12 * 2**20
"""Growth below this over the whole time is noise of the allocators."""


@dataclass(slots=True)
class Memory:
    """One process over time."""

    name: str
    pid: int
    samples: list[tuple[float, int]] = field(default_factory=list)  # (seconds, bytes)

    def judged(self) -> list[tuple[float, int]]:
        start_s = self.samples[0][0] + WARM_UP_SHARE * (self.samples[-1][0] - self.samples[0][0])
        return [sample for sample in self.samples if sample[0] >= start_s]

    def slope_bytes_per_s(self) -> float:
        """Least squares over the judged samples."""
        samples = self.judged()
        mean_s = sum(at_s for at_s, _ in samples) / len(samples)
        mean_bytes = sum(size for _, size in samples) / len(samples)
        spread = sum((at_s - mean_s) ** 2 for at_s, _ in samples)
        return sum((at_s - mean_s) * (size - mean_bytes) for at_s, size in samples) / spread if spread else 0.0

    def growth_bytes(self) -> float:
        samples = self.judged()
        return self.slope_bytes_per_s() * (samples[-1][0] - samples[0][0])

    @property
    def grows(self) -> bool:
        return self.growth_bytes() > max(MIN_GROWTH_BYTES, MAX_GROWTH_SHARE * self.samples[-1][1])


class Clients:
    """Owns the outcome of every request."""

    def __init__(self, url: str, dice: random.Random) -> None:
        self.outcomes: Counter[str] = Counter()
        self._url = url
        self._dice = dice

    async def run(self, until_s: float) -> None:
        """One client that asks until the time is over."""
        async with httpx.AsyncClient(timeout=120) as http:
            while time.monotonic() < until_s:
                self.outcomes[await self._ask(http)] += 1
                await asyncio.sleep(self._dice.expovariate(4.0))

    async def _ask(self, http: httpx.AsyncClient) -> str:
        dice = self._dice
        subject = f"subject {dice.randrange(20)} " * dice.randrange(1, 60)
        body = {
            "model": MODEL,
            "prompt": f"{subject} and now {dice.random()}",
            "max_tokens": dice.randrange(1, 120),
            "n": dice.choice((1, 1, 1, 2)),
            "stream": dice.random() < 0.6,
            "ignore_eos": True,
        }
        patience_s = dice.uniform(0.01, 0.5) if dice.random() < 0.15 else 100.0
        try:
            async with asyncio.timeout(patience_s), http.stream("POST", f"{self._url}/v1/completions", json=body) as response:
                text = (await response.aread()).decode()
        except TimeoutError:
            return "hung up" if patience_s < 1 else "no answer in time"
        except httpx.HTTPError as error:
            return repr(error)
        if response.status_code != 200 or '"error":' in text:
            return f"status {response.status_code}: {text[-200:]}"
        return "answered"


async def run(cluster: ServedCluster, minutes: float, num_clients: int, seed: int) -> tuple[list[Memory], Clients, list[str]]:
    await cluster.wait_ready()
    processes = [
        Memory(f"{deployment} {replica_id}", pid)
        for deployment in (GATEWAY, ROUTER, REPLICA)
        for replica_id, pid in (await cluster.pids(deployment)).items()
    ]
    until_s = time.monotonic() + 60 * minutes
    clients = Clients(cluster.url, random.Random(seed))
    faults: list[str] = []
    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(clients.run(until_s))
        while time.monotonic() < until_s:
            for process in processes:
                process.samples.append((time.monotonic(), cluster.memory_bytes(process.pid)))
            await asyncio.sleep(SAMPLE_S)
    try:
        await cluster.wait_ready(30.0)
    except TimeoutError as error:
        faults.append(f"something is still held: {error}")
    faults += [f"{count} requests: {outcome}" for outcome, count in clients.outcomes.items() if outcome not in ("answered", "hung up")]
    faults += [f"{process.name} grew by {process.growth_bytes() / 2**20:.1f} MiB" for process in processes if process.grows]
    return processes, clients, faults


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("build/soak"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a cluster must not be left behind
    folder = arguments.folder.resolve()
    with ServedCluster(folder, Layout(num_replicas=2, num_gateways=1)) as cluster:
        processes, clients, faults = asyncio.run(run(cluster, arguments.minutes, arguments.clients, arguments.seed))
    print("| process | MiB after warm-up | MiB at the end | slope, MiB an hour |\n|---|---|---|---|")
    for process in processes:
        first, last = process.judged()[0][1], process.samples[-1][1]
        print(f"| {process.name} | {first / 2**20:.1f} | {last / 2**20:.1f} | {process.slope_bytes_per_s() * 3600 / 2**20:+.2f} |")
    print(dict(clients.outcomes))
    print(*faults or ["no block leaked, no memory grew, no answer failed"], sep="\n")
    body = {"faults": faults, "outcomes": clients.outcomes, "memory": {process.name: process.samples for process in processes}}
    (folder / "report.json").write_text(json.dumps(body))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
