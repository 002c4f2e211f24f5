"""Measures the deployed router: cache hits of conversations, predicted against actual and simulated times, priorities.

`python -m tests.bench.live_routing conversations | prediction | priority`; each starts a cluster of its own.
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
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx

from kvcache.hashing import CacheIdentity, block_keys
from router.config import RouterConfig
from router.policies.policy_choice import make_policy
from router.simulator.hardware import MODELS, Device, StepTimer
from router.simulator.simulation import Simulation, SimulationConfig
from router.simulator.traces import TraceRequest
from tests import prompts
from tests.bench.machine import hardware_line
from tests.chaos.served_cluster import MODEL, Layout, ServedCluster
from tests.chaos.streams import Stream

RAY_LOGS = Path("/tmp/ray/session_latest/logs")
BLOCK_SIZE = 16
BUSY_TOKENS = 3000  # of each stream that holds the only replica until all of both priorities wait
STEP_TOKENS = 256  # the budget of a step, live and simulated


async def conversations(cluster: ServedCluster, arguments: argparse.Namespace) -> int:
    """Conversations that grow turn by turn: how much of what a turn shares with the one before was cached, and where the work went."""
    await cluster.wait_ready(300.0)
    shares: list[float] = []
    worst: tuple[float, str] = (1.0, "")  # the least share, and how its turn was decided
    work: Counter[str] = Counter()  # replica -> tokens computed there
    texts = _paragraphs()
    system = " ".join(texts[-4:])  # what all of them begin with
    async with httpx.AsyncClient(timeout=300) as http:

        async def tokens(text: str) -> list[int]:
            body = {"model": MODEL, "prompt": text}
            return list((await http.post(f"{cluster.url}/tokenize", json=body)).json()["tokens"])

        async def converse(number: int) -> None:
            nonlocal worst
            text, before = f"{system}\n\nConversation {number}.", []
            for turn in range(arguments.turns):
                text += f"\n\nUser: {texts[number * arguments.turns + turn]}\nAssistant:"
                prompt = await tokens(text)
                body = {"temperature": 0, "prompt": text, "ignore_eos": True}
                stream = await Stream(index=number, max_tokens=24, body=body).run(http, cluster.url)
                if stream.error is not None:
                    raise RuntimeError(stream.error)
                shared = next((i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), min(len(before), len(prompt)))
                answers = (await http.get(f"{cluster.url}/debug/router/explain/{stream.answer_id}")).json()["answers"]
                if turn:
                    shares.append(stream.num_cached_tokens / shared)
                    worst = min(
                        worst, (shares[-1], f"conversation {number}, turn {turn}, {shared} tokens shared: {json.dumps(answers[-1])}")
                    )
                work[answers[-1]["replica"]] += len(prompt) - stream.num_cached_tokens + stream.num_tokens
                text += stream.text
                before = await tokens(text)

        await asyncio.gather(*(converse(number) for number in range(arguments.conversations)))
    num_replicas = cluster.layout.num_replicas
    busiest = max(work.values()) / (sum(work.values()) / num_replicas)
    num_moved = sum(share < 0.9 for share in shares)  # to a less busy replica, where that was the sooner answer
    print(f"{len(shares)} later turns: {median(shares):.1%} of what each shares was cached at the median, {min(shares):.1%} at least")
    print(f"{num_moved} of them went where less than 90 % was cached; the worst: {worst[1]}")
    print(f"busiest replica {busiest:.2f}x the mean of {num_replicas}, work {dict(work)}")
    return int(num_moved > 0 or busiest > 1.5)


async def prediction(cluster: ServedCluster, arguments: argparse.Namespace) -> int:
    """Requests at random moments: predicted against actual time to first token, and the simulator's mean for the same requests."""
    await cluster.wait_ready(300.0)
    dice = random.Random(arguments.seed)
    texts = " ".join(_paragraphs()).split()
    streams: list[Stream] = []
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as http:
        tasks: list[asyncio.Task[Stream]] = []
        started_s = time.monotonic()
        judged_s = started_s + 60 * (arguments.minutes - 1)  # the last minute is the recorded one; what comes before warms up
        speeds = _Speeds()
        watch = asyncio.create_task(speeds.watch(cluster, judged_s))
        while time.monotonic() < started_s + 60 * arguments.minutes:
            await asyncio.sleep(dice.expovariate(arguments.rate))
            length = dice.randrange(40, 300)
            start = dice.randrange(len(texts) - length)
            prompt = f"{dice.random()} {' '.join(texts[start : start + length])}"
            stream = Stream(index=len(streams), max_tokens=16, body={"prompt": prompt, "temperature": 0})
            streams.append(stream)
            tasks.append(asyncio.create_task(stream.run(http, cluster.url)))
        await asyncio.gather(*tasks)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    records = _access_records({str(stream.answer_id) for stream in streams})
    ratios, live = [], []
    trace: list[TraceRequest] = []
    for stream in streams:
        record = records.get(str(stream.answer_id))
        if record is None or stream.error is not None:
            print(f"request {stream.index} is lost: {stream.error}")
            return 1
        if stream.sent_s < started_s + 60 * min(1.0, arguments.minutes / 3):
            continue
        ratios.append((record["ttft_ms"] - record["queue_ms"]) / record["predicted_ttft_ms"])
        if stream.sent_s >= judged_s:
            live.append(record["ttft_ms"] / 1000)
            trace.append(_trace_request(len(trace), stream.sent_s - judged_s, record))
    rate, step_s = 1 / mean(speeds.seconds_per_token), mean(speeds.decode_step_s)
    simulated = _simulate(trace, rate, step_s, speeds.num_blocks)
    errors = [abs(ratio - 1) for ratio in ratios]
    mean_live, mean_simulated = sum(live) / len(live), sum(simulated) / len(simulated)
    print(hardware_line(2))
    print(f"{len(ratios)} requests at {arguments.rate}/s, prefill {rate:.0f} tokens/s, decode step {1000 * step_s:.1f} ms")
    print(f"predicted TTFT is off by {median(errors):.1%} at the median (actual / predicted: {median(ratios):.2f})")
    print(
        f"one minute of {len(live)} requests: mean TTFT {1000 * mean_live:.0f} ms live, {1000 * mean_simulated:.0f} ms simulated "
        f"({mean_simulated / mean_live - 1:+.1%})"
    )
    return int(median(errors) > 0.3 or abs(mean_simulated / mean_live - 1) > 0.2)


class _Speeds:
    """What the one replica reported while the minute was recorded, once a second: a machine changes its speed within minutes."""

    def __init__(self) -> None:
        self.seconds_per_token: list[float] = []
        self.decode_step_s: list[float] = []
        self.num_blocks = 0

    async def watch(self, cluster: ServedCluster, from_s: float) -> None:
        """Until cancelled."""
        await asyncio.sleep(from_s - time.monotonic())
        while True:
            for replica in (await cluster.view())["replicas"].values():
                self.seconds_per_token.append(1 / replica["prefill_tokens_per_s"])
                self.decode_step_s.append(replica["decode_step_s"])
                self.num_blocks = replica["num_blocks"]
            await asyncio.sleep(1.0)


async def priority(cluster: ServedCluster, arguments: argparse.Namespace) -> int:
    """More requests than fit, of two priorities, over two gateways: the urgent ones all begin first."""
    await cluster.wait_ready(300.0)
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as http:
        busy = [asyncio.create_task(Stream(index=i, max_tokens=BUSY_TOKENS).run(http, cluster.url)) for i in range(4)]
        await asyncio.sleep(0.5)
        streams = [Stream(index=i, max_tokens=30, body={"priority": 1 if i < 20 else 0}) for i in range(40)]
        tasks = []
        for stream in streams:  # the less urgent ones come first
            tasks.append(asyncio.create_task(stream.run(http, cluster.url)))
            await asyncio.sleep(0.005)
        num_begun = sum(bool(stream.arrivals_s) for stream in streams)
        callers = set()
        while not all(task.done() for task in tasks):
            callers |= {name for each in (await cluster.view())["replicas"].values() for name in each["callers"]}
            await asyncio.sleep(0.1)
        await asyncio.gather(*busy)
    order = sorted(streams, key=lambda stream: stream.arrivals_s[0])
    ranks = [rank for rank, stream in enumerate(order) if stream.body["priority"] == 0]
    num_early = sum(stream.body["priority"] == 1 for stream in order[: max(ranks)])
    print(f"40 requests over {len(callers)} gateways: {num_early} of 20 less urgent, sent first, began before the last urgent one")
    if num_begun or len(callers) < 2:
        print(f"this says nothing: {num_begun} had begun when the last was sent, and {len(callers)} of 2 gateways got requests")
        return 1
    return int(num_early > 4)  # what was dispatched before the urgent ones came, and one in eight by age


def _access_records(answer_ids: set[str]) -> dict[str, dict[str, Any]]:
    """The gateways' access records of these answers."""
    found = {}
    for path in RAY_LOGS.glob("serve/replica_manta_gateway_*.log"):
        for line in path.read_text(errors="replace").splitlines():
            if '"response_id"' in line:
                record = json.loads(line[line.index("{") :])
                if record["response_id"] in answer_ids:
                    found[record["response_id"]] = record
    return found


def _trace_request(number: int, arrival_s: float, record: dict[str, Any]) -> TraceRequest:
    length = record["prompt_tokens"]
    keys = block_keys(CacheIdentity(), (number,) * length, BLOCK_SIZE)
    return TraceRequest(
        request_id=str(number),
        arrival_s=arrival_s,
        num_prompt_tokens=length,
        num_output_tokens=record["output_tokens"],
        runs=(number,),
        block_keys=tuple(keys),
        num_new_tokens=length,
    )


def _simulate(trace: Sequence[TraceRequest], prefill_tokens_per_s: float, decode_step_s: float, num_blocks: int) -> list[float]:
    """TTFT of each request on one replica with the measured speeds; everything else is the simulator's own."""
    model = MODELS["135m"]
    device = Device(
        name="as measured",
        flops_per_s=2.0 * model.num_params * prefill_tokens_per_s,
        bytes_per_s=model.weight_bytes / decode_step_s,
        memory_bytes=8e9,
        compute_share=1.0,
        bandwidth_share=1.0,
        overhead_s=0.0,
    )
    router_config = RouterConfig(prior_prefill_tokens_per_s=prefill_tokens_per_s)
    config = SimulationConfig(
        num_replicas=1,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=64,
        max_num_batched_tokens=STEP_TOKENS,
        has_deadlines=False,
    )
    simulation = Simulation(config, router_config, make_policy(router_config), StepTimer(model, device))
    return [outcome.ttft_s for outcome in simulation.run(trace).outcomes if outcome.ttft_s is not None]


def _paragraphs() -> list[str]:
    asked = [" ".join(turns) for turns in prompts.conversations()]
    return asked + [" ".join((context, *questions)) for context, questions in prompts.reading_tasks()]


LAYOUTS = {
    "conversations": Layout(num_replicas=3, num_gateways=1, is_default_model=True),
    "prediction": Layout(
        num_replicas=1, num_gateways=1, is_default_model=True, engine={"num_threads": 2, "max_num_batched_tokens": STEP_TOKENS}
    ),
    "priority": Layout(num_replicas=1, num_gateways=2, engine={"max_num_seqs": 2}, router={"dispatch_ahead": 1}),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.live_routing", description=__doc__)
    parser.add_argument("what", choices=list(LAYOUTS))
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--rate", type=float, default=0.8, help="requests a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("build/live_routing"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a cluster must not be left behind
    run = {"conversations": conversations, "prediction": prediction, "priority": priority}[arguments.what]
    with ServedCluster(arguments.folder.resolve(), LAYOUTS[arguments.what]) as cluster:
        return asyncio.run(run(cluster, arguments))


if __name__ == "__main__":
    sys.exit(main())
