"""Measures the cost of a routing decision: time at 64 and 1,000 replicas, and memory over millions of requests.

    python -m tests.bench.router_decisions speed | lookup | soak [--requests NUMBER] [--output FILE]

No engine runs: replicas are counters that report the requests sent to them. Every prompt has 8,000 tokens in 500 blocks (in the
soak 320 in 20), half of it one of a few hundred shared prefixes. A decision's time is that of `submit` and `step`, including
its booking, in CPU time of the thread, so that other work on the machine matters less.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import OrderedDict, deque
from itertools import pairwise
from pathlib import Path
from random import Random
from time import thread_time

from kvcache.events import BlockEvicted, BlockStored, KVEvent
from replicas.stats import ReplicaReport, ReplicaStats
from router.config import RouterConfig
from router.fleet.prefix_index import PrefixIndex
from router.policies.policy_choice import make_policy
from router.router import Router
from router.snapshot import Decision, Rejection, RoutingRequest

NUM_BLOCKS = 500
BLOCK_SIZE = 16
ROOT = b"root"


class CountingReplica:
    """Reports what it was sent. Its cache is an LRU of whole tails behind shared prefixes, so its events are real ones."""

    def __init__(self, replica_id: str, num_prompts: int) -> None:
        self.replica_id = replica_id
        self.num_prompts = num_prompts
        self.cached: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()  # last key -> keys of one prompt
        self.count: dict[bytes, int] = {}
        self.events: list[KVEvent] = []
        self.first_event = 0
        self.num_steps = 0
        self.num_finished = 0

    def run(self, keys: tuple[bytes, ...]) -> None:
        self.num_finished += 1
        if keys[-1] in self.cached:
            self.cached.move_to_end(keys[-1])
            return
        self.cached[keys[-1]] = keys
        parent = ROOT
        for key in keys:
            self.count[key] = self.count.get(key, 0) + 1
            if self.count[key] == 1:
                self.events.append(BlockStored(key, parent))
            parent = key
        if len(self.cached) > self.num_prompts:
            _, old = self.cached.popitem(last=False)
            for key in reversed(old):
                self.count[key] -= 1
                if not self.count[key]:
                    del self.count[key]
                    self.events.append(BlockEvicted(key))

    def report(self) -> ReplicaReport:
        self.num_steps += 1
        first, self.first_event = self.first_event, self.first_event + len(self.events)
        events, self.events = tuple(self.events), []
        stats = ReplicaStats(
            num_blocks=200_000,
            num_free_blocks=100_000,
            num_cached_blocks=len(self.count),
            prefill_tokens_per_s=30_000.0,
            decode_step_s=0.02,
            num_steps=self.num_steps,
            num_finished=self.num_finished,
        )
        return ReplicaReport(
            replica_id=self.replica_id,
            model="m",
            epoch=1,
            stats=stats,
            block_size=BLOCK_SIZE,
            max_num_seqs=256,
            first_event=first,
            events=events,
        )


class Load:
    """Makes prompts, sends them through a router, and lets the replicas report in turn."""

    def __init__(
        self, num_replicas: int, *, num_prompts: int, num_prefixes: int, num_blocks: int = NUM_BLOCKS, num_tenants: int = 50, seed: int = 1
    ) -> None:
        self.num_blocks = num_blocks
        self.num_tenants = num_tenants
        config = RouterConfig(prior_prefill_tokens_per_s=30_000.0)
        self.router = Router(config, make_policy(config))
        self.replicas = {f"r{number:04}": CountingReplica(f"r{number:04}", num_prompts) for number in range(num_replicas)}
        self.turns = deque(self.replicas.values())
        self.rng = Random(seed)
        self.prefixes = [self._chain(number, num_blocks // 2) for number in range(num_prefixes)]
        self.waiting: OrderedDict[str, tuple[bytes, ...]] = OrderedDict()
        self.running: deque[tuple[float, str, str, tuple[bytes, ...]]] = deque()
        self.now_s = 0.0
        self.num_sent = 0
        for replica in self.replicas.values():
            self.router.apply_report(replica.report(), 0.0)

    def send(self, *, interval_s: float) -> float:
        """One request; returns the seconds that deciding took."""
        self.now_s += interval_s
        self.num_sent += 1
        prefix = self.prefixes[min(len(self.prefixes) - 1, int(self.rng.expovariate(8 / len(self.prefixes))))]
        keys = (*prefix, *self._chain(1_000_000 + self.num_sent, self.num_blocks - len(prefix)))
        request = RoutingRequest(
            request_id=f"q{self.num_sent}",
            model="m",
            num_prompt_tokens=self.num_blocks * BLOCK_SIZE + 5,
            max_tokens=256,
            block_keys=keys,
            tenant=f"t{self.rng.randrange(self.num_tenants)}",
            priority=self.rng.randrange(3),
            arrival_s=self.now_s,
        )
        started_s = thread_time()
        self.router.submit(request, self.now_s)
        answers = self.router.step(self.now_s)
        elapsed_s = thread_time() - started_s
        self.waiting[request.request_id] = keys
        self._start(answers)
        return elapsed_s

    def wait(self, interval_s: float) -> None:
        """Time passes, one replica reports, and the router looks at its queue."""
        self.now_s += interval_s
        self.report_next()
        self._start(self.router.step(self.now_s))

    def cancel_one(self) -> None:
        """The client of the request that has waited longest leaves; nothing happens when none waits."""
        if self.waiting:
            request_id, _ = self.waiting.popitem(last=False)
            self.router.cancel(request_id, self.now_s)

    def _start(self, answers: list[Decision | Rejection]) -> None:
        for answer in answers:
            keys = self.waiting.pop(answer.request_id)
            if isinstance(answer, Decision):
                self.running.append((self.now_s + 0.5, answer.request_id, answer.replica_id, keys))
        while self.running and self.running[0][0] <= self.now_s:
            _, request_id, replica_id, ran = self.running.popleft()
            self.replicas[replica_id].run(ran)
            self.router.release(request_id, self.now_s, 100)

    def report_next(self) -> None:
        replica = self.turns[0]
        self.turns.rotate(-1)
        self.router.apply_report(replica.report(), self.now_s)

    def _chain(self, number: int, length: int) -> tuple[bytes, ...]:
        # 32 bytes like a real key; drawn, not hashed, because hashing is the gateway's work
        return tuple(number.to_bytes(16, "big") + position.to_bytes(16, "big") for position in range(length))


def speed(out: Path | None) -> None:
    figures: dict[str, object] = {}
    for num_replicas in (64, 1_000):
        load = Load(num_replicas, num_prompts=20, num_prefixes=200)
        interval_s = 0.5 / num_replicas
        times = []
        for number in range(6_000):
            elapsed_s = load.send(interval_s=interval_s)
            if number >= 1_000:
                times.append(elapsed_s)
            load.report_next()
        times.sort()
        figure = {
            "p50_us": 1e6 * times[len(times) // 2],
            "p99_us": 1e6 * times[len(times) * 99 // 100],
            "decisions_per_s": len(times) / sum(times),
        }
        figures[f"{num_replicas} replicas"] = figure
        print(num_replicas, figure, flush=True)
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")


def lookup(out: Path | None) -> None:
    """The index alone: one prompt whose blocks 64 replicas hold to 64 different depths, among 100,000 blocks of others."""
    rng = Random(1)
    figures: dict[str, object] = {}
    for num_tokens in (8_000, 128_000):
        index = PrefixIndex()
        num_blocks = num_tokens // BLOCK_SIZE
        prompt = [b"prompt" + position.to_bytes(26, "big") for position in range(num_blocks)]
        for number in range(64):
            events = [BlockStored(key, parent) for parent, key in pairwise((ROOT, *prompt[: rng.randrange(1, num_blocks)]))]
            other = [rng.randbytes(32) for _ in range(1_500)]
            events += [BlockStored(key, parent) for parent, key in pairwise((ROOT, *other))]
            index.apply(f"r{number:02}", epoch=1, first_event=0, events=events)
        times = []
        for _ in range(200):
            keys = tuple(bytes(bytearray(key)) for key in prompt)  # a prompt's keys come in a message, not from the index
            started_s = thread_time()
            depths = index.match(keys)
            times.append(thread_time() - started_s)
            assert len(depths) == 64
        times.sort()
        figure = {"p50_us": 1e6 * times[len(times) // 2], "p99_us": 1e6 * times[len(times) * 99 // 100]}
        figures[f"{num_tokens} tokens"] = figure
        print(f"lookup of {num_tokens} tokens over 64 replicas", figure, flush=True)
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")


def resident_bytes() -> int:
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(num_requests: int, out: Path | None) -> None:
    """Bursts of 64 that fill the queue, from a million tenants; one request in 64 is cancelled while it waits."""
    load = Load(8, num_prompts=100, num_prefixes=50, num_blocks=20, num_tenants=1_000_000)
    rows = []
    most_waiting = 0
    for number in range(1, num_requests + 1):
        load.send(interval_s=0.0)
        if number % 64 == 0:
            load.cancel_one()
            most_waiting = load.router.num_waiting
            for _ in range(16):
                load.wait(0.08)
        if number % (num_requests // 20) == 0:
            model = load.router._models["m"]
            row = {
                "requests": number,
                "resident_mb": resident_bytes() / 1e6,
                "index_blocks": model._index.num_nodes,
                "pending": model._ledger.num_pending_entries,
                "bookings": len(model._ledger),
                "waiting_after_a_burst": most_waiting,
                "waiting": model.num_waiting,
                "tenants": sum(len(tier.counters) for tier in model._queue._tiers.values()),
            }
            rows.append(row)
            print(row, flush=True)
    if out is not None:
        out.write_text(json.dumps(rows, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.router_decisions", description=__doc__)
    parser.add_argument("what", choices=("speed", "lookup", "soak"))
    parser.add_argument("--requests", type=int, default=2_000_000, help="of the soak")
    parser.add_argument("--output", type=Path, help="a file for the figures as JSON")
    options = parser.parse_args()
    if options.what == "soak":
        soak(options.requests, options.output)
    else:
        {"speed": speed, "lookup": lookup}[options.what](options.output)


if __name__ == "__main__":
    main()
