"""Measures the price of the service: TTFT and inter-token latency over HTTP against the engine alone, at one and at 16 clients.

Usage: python -m tests.bench.http_price PORT NAME [--model FOLDER] [--dtype float32]

NAME must be served on PORT from the same FOLDER (the default model when absent). The two take turns: the served replicas are idle while
the engine of this process is measured, and the other way round. Prompts, lengths and the closed loop are those of http_load.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from replicas.engine.async_engine import AsyncEngine
from replicas.engine_config import EngineConfig
from replicas.model.default_model import prepare_default_model
from replicas.request import GenerationRequest
from replicas.sampling_params import SamplingParams
from replicas.step_engine import StepEngine
from replicas.text.tokenizer import Tokenizer
from tests.bench.machine import hardware_line
from tests.data_paths import PUBLIC_DATA

HTTP_LOAD = PUBLIC_DATA.parent / "bench" / "http_load.py"
MAX_TOKENS = 64
CLIENTS = (1, 16)


@dataclass(slots=True)
class Latencies:
    """Seconds, one entry per request or per gap between messages."""

    ttft_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)


async def one_request(engine: AsyncEngine, tokenizer: Tokenizer, index: int, max_tokens: int, found: Latencies) -> None:
    start_s = last_s = time.perf_counter()
    messages = [{"role": "user", "content": f"Write a short story number {index} about a robot."}]
    request = GenerationRequest(
        request_id=f"{time.monotonic_ns()}-{index}",
        prompt_ids=tuple(tokenizer.chat_prompt_ids(messages)),
        params=SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
        seed=0,
    )
    is_first = True
    async for _ in engine.generate(request):
        now_s = time.perf_counter()
        if is_first:
            found.ttft_s.append(now_s - start_s)
        else:
            found.gap_s.append(now_s - last_s)
        is_first, last_s = False, now_s


async def engine_alone(engine: AsyncEngine, tokenizer: Tokenizer, num_clients: int) -> dict[str, float]:
    found = Latencies()
    await one_request(engine, tokenizer, 10_000, 8, Latencies())  # warm-up
    pending = iter(range(2 * num_clients if num_clients > 1 else 8))

    async def client(indices: Iterator[int]) -> None:
        for index in indices:
            await one_request(engine, tokenizer, index, MAX_TOKENS, found)

    await asyncio.gather(*(client(pending) for _ in range(num_clients)))
    return {"ttft_p50_ms": median_ms(found.ttft_s), "itl_p50_ms": median_ms(found.gap_s)}


def over_http(port: int, name: str, num_clients: int) -> dict[str, float]:
    num_requests = 2 * num_clients if num_clients > 1 else 8
    arguments = ["--clients", str(num_clients), "--requests", str(num_requests), "--max-tokens", str(MAX_TOKENS)]
    command = [sys.executable, str(HTTP_LOAD), str(port), name, *arguments]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)
    return {key: answer[key] for key in ("ttft_p50_ms", "itl_p50_ms", "tokens_per_s")}


def median_ms(values: list[float]) -> float:
    return round(1000 * sorted(values)[len(values) // 2], 2)


def load_bench_engine(model: Path, dtype: str) -> StepEngine:
    from replicas.engine.loader import load_engine

    return load_engine(EngineConfig(model=str(model), dtype=dtype, kv_cache_bytes=512 * 2**20))  # type: ignore[arg-type]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("name")
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    arguments = parser.parse_args()
    model = arguments.model or prepare_default_model()
    print(json.dumps({"hardware": hardware_line(len(os.sched_getaffinity(0))), "load_average_before": os.getloadavg()[0]}), flush=True)
    tokenizer = Tokenizer.load(model)
    engine = AsyncEngine(lambda: load_bench_engine(model, arguments.dtype))
    await engine.start()
    for num_clients in arguments.clients:
        rounds = []
        for _ in range(arguments.rounds):
            alone = await engine_alone(engine, tokenizer, num_clients)
            served = await asyncio.to_thread(over_http, arguments.port, arguments.name, num_clients)
            rounds.append({"alone": alone, "http": served, "ttft_price_ms": round(served["ttft_p50_ms"] - alone["ttft_p50_ms"], 2)})
        prices = sorted(each["ttft_price_ms"] for each in rounds)
        print(json.dumps({"clients": num_clients, "ttft_price_ms_median": prices[len(prices) // 2], "rounds": rounds}), flush=True)
    await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
