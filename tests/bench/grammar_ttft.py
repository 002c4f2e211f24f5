"""Time to first token over HTTP: without a grammar, with a schema that is known, and with one that nobody has seen before.

    .venv/bin/python -m tests.bench.grammar_ttft --rounds 200

Interleaved, one request at a time, on a cluster of its own with the default model. A new schema passes a check process of the gateway, is
compiled by the engine, and starts with a mask that nothing has cached. Fails beyond the bounds. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.bench.grammar_cost import KEYS, SCHEMA
from tests.bench.machine import hardware_line
from tests.chaos.report import percentile
from tests.chaos.served_cluster import MODEL, Layout, ServedCluster

FREE, KNOWN, NEW = "no grammar", "known schema", "new schema"
MOST_KNOWN_MS = 2.0
"""More than without a grammar, at the median."""
MOST_NEW_MS = 30.0
"""More than without a grammar, at the 99th percentile."""
NUM_WARM = 10
PROMPT = "Number {number}. Invent an order of a small shop and write it down as JSON, with everything that the parcel service must know."


def schema_with(suffix: str) -> dict[str, Any]:
    """The schema of the other costs, with names that end in `suffix`."""
    properties: Mapping[str, Any] = SCHEMA["properties"]  # type: ignore[assignment]
    return {**SCHEMA, "properties": {key + suffix: properties[key] for key in KEYS}, "required": [key + suffix for key in KEYS]}


def body_of(kind: str, number: int) -> bytes:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": PROMPT.format(number=number)}],
        "max_tokens": 4,
        "stream": True,
    }
    if kind != FREE:
        schema = schema_with("" if kind == KNOWN else f"_{number}")
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "order", "schema": schema}}
    return json.dumps(body).encode()


def first_token_s(http: httpx.Client, url: str, body: bytes) -> float:
    """Raises RuntimeError for an answer without a token."""
    start_s = time.perf_counter()
    first_s = None
    with http.stream("POST", f"{url}/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}) as response:
        for line in response.iter_lines():
            if first_s is None and line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                first_s = time.perf_counter() - start_s
    if first_s is None:
        raise RuntimeError(f"no token came: status {response.status_code}")
    return first_s


def measure(url: str, rounds: int, seed: int) -> dict[str, list[float]]:
    """Milliseconds of each kind."""
    dice = random.Random(seed)
    found: dict[str, list[float]] = {FREE: [], KNOWN: [], NEW: []}
    number = dice.randrange(10**6, 9 * 10**6)
    with httpx.Client(timeout=60) as http:
        for place in range(NUM_WARM + rounds):
            for kind in dice.sample(list(found), k=len(found)):
                number += 1
                ms = 1e3 * first_token_s(http, url, body_of(kind, number))
                if place >= NUM_WARM:
                    found[kind].append(ms)
    return found


def faults_of(found: Mapping[str, Sequence[float]]) -> list[str]:
    print("| time to first token, ms | p50 | p90 | p99 | longest |\n|---|---|---|---|---|")
    for kind, values in found.items():
        shares = " | ".join(f"{percentile(values, share):.1f}" for share in (0.5, 0.9, 0.99))
        print(f"| {kind} | {shares} | {max(values):.1f} |")
    known_ms = statistics.median(found[KNOWN]) - statistics.median(found[FREE])
    new_ms = percentile(found[NEW], 0.99) - percentile(found[FREE], 0.99)
    print(f"known: {known_ms:+.1f} ms at the median; new: {new_ms:+.1f} ms at p99")
    faults = [] if known_ms <= MOST_KNOWN_MS else [f"a known schema costs {known_ms:.1f} ms at the median, more than {MOST_KNOWN_MS:.0f}"]
    return faults if new_ms <= MOST_NEW_MS else [*faults, f"a new schema costs {new_ms:.1f} ms at p99, more than {MOST_NEW_MS:.0f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", help="of a server that runs; a cluster is started if left out")
    parser.add_argument("--folder", type=Path, default=Path("build/grammar-ttft"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a cluster must not be left behind
    print(hardware_line(1))
    if arguments.url:
        found = measure(arguments.url, arguments.rounds, arguments.seed)
    else:
        with ServedCluster(arguments.folder.resolve(), Layout(num_replicas=1, num_gateways=1, is_default_model=True)) as cluster:
            found = measure(cluster.url, arguments.rounds, arguments.seed)
    faults = faults_of(found)
    print(*(f"FAULT {fault}" for fault in faults), sep="\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
