"""Every known bomb, over HTTP, to a cluster that serves ordinary streams: what the clients and the processes notice of it.

    python -m tests.chaos.grammar_bombs [--seconds 60] [--quick]

Fails if a bomb is not answered within 3 seconds by a refusal, a request to retry or an answer that follows it, if the ordinary streams'
gaps (p99) double, or if a process is lost or keeps memory. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import sys
import time
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from replicas.grammar_spec import GrammarKind, GrammarSpec
from tests.bench.machine import hardware_line
from tests.chaos.ordinary_streams import OrdinaryStreams
from tests.chaos.report import percentile
from tests.chaos.served_cluster import GATEWAY, MODEL, REPLICA, ROUTER, Layout, ServedCluster
from tests.grammar_bombs import BOMBS

NUM_STREAMS = 8
NUM_TENANTS = 4
NUM_AT_ONCE = 4
NUM_TOKENS = 8
MOST_S = 3.0
MOST_GAP_RATIO = 2.0
MOST_LEFT_SHARE, MOST_LEFT_BYTES = 0.05, 20 << 20
WARM_UP_S = 5.0
SETTLE_S = 3.0
"""After the last bomb: until slow checks are killed and their successors are ready."""
NUM_SMALL = 80
"""Small grammars sent before memory is read, so that no cache holds a bomb's grammar."""
QUICK = [
    "nested minItems", "repetition of classes", "optional properties", "optional properties behind a choice", "nesting", "endless object",
    "chain through items", "constants side by side", "choices as a terminal", "joined terminals", "parentheses in GBNF", "many tags",
]  # fmt: skip

TOO_LONG = {
    "enum of 1e6": '{"enum":[' + ",".join(f'"choice {place}"' for place in range(10**6)) + "]}",
    "nesting of 1e5": '{"items":' * 10**5 + "{}" + "}" * 10**5,
}
"""Schemas beyond the limits of a body and of nesting."""

Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """One bomb as it is sent."""

    name: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    name: str
    seconds: float
    status: int
    retry_after: str | None
    text: str

    @property
    def outcome(self) -> str:
        return "busy" if self.status == 503 and self.retry_after else str(self.status)

    @property
    def fault(self) -> str | None:
        if self.seconds > MOST_S:
            return f"{self.name}: answered after {self.seconds:.1f} s ({self.outcome})"
        if self.status == 200 or 400 <= self.status < 500 or self.outcome == "busy":
            return None
        return f"{self.name}: {self.status} {self.text[:200]}"


def shots(number: int, names: Iterable[str]) -> list[Shot]:
    """Those of one pass. Its number is in each grammar, so that nobody has seen it before. Even passes send schemas as objects, which takes
    another way through the gateway than their text."""
    is_object = number % 2 == 0
    found = [Shot(name=name, body=_body(_numbered(BOMBS[name], number), is_object)) for name in names]
    return found + [Shot(name=name, body=_schema_body(text)) for name, text in TOO_LONG.items() if is_object]


def _numbered(spec: GrammarSpec, number: int) -> GrammarSpec:
    text = spec.text
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            text = text.replace("{", f'{{"$comment":"{number}"' + ("" if text.startswith("{}") else ","), 1)
        case GrammarKind.REGEX:
            text = f"{number}{text}"
        case GrammarKind.CHOICE:
            text = json.dumps([*json.loads(text), f"number {number}"])
        case GrammarKind.LARK:
            text = f"{text}\n// {number}"
        case GrammarKind.GBNF:
            text = f"{text}\n# {number}"
        case GrammarKind.STRUCTURAL_TAG:
            text = text.replace("<t0>", f"<t0-{number}>")
    return replace(spec, text=text)


def _body(spec: GrammarSpec, is_object: bool = False) -> bytes:
    if is_object and spec.kind is GrammarKind.JSON_SCHEMA:
        return _schema_body(spec.text)
    fields = {
        GrammarKind.JSON_SCHEMA: "json",
        GrammarKind.REGEX: "regex",
        GrammarKind.CHOICE: "choice",
        GrammarKind.LARK: "grammar",
        GrammarKind.GBNF: "grammar",
        GrammarKind.STRUCTURAL_TAG: "structural_tag",
    }
    value = json.loads(spec.text) if spec.kind is GrammarKind.CHOICE else spec.text
    return json.dumps(_asked({"structured_outputs": {fields[spec.kind]: value}})).encode()


def _schema_body(text: str) -> bytes:
    wanted = {"response_format": {"type": "json_schema", "json_schema": {"name": "bomb", "schema": "SCHEMA"}}}
    return json.dumps(_asked(wanted)).replace('"SCHEMA"', text).encode()


def _asked(fields: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Go on."}]
    return {"model": MODEL, "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 1.0, **fields}


class Bomber:
    """Owns the answers to all bombs."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._tenants = itertools.cycle(f"tenant-{number}" for number in range(NUM_TENANTS))
        self.answers: list[Answer] = []

    async def send(self, sent: Sequence[Shot], num_at_once: int) -> None:
        """Returns when all are answered; `num_at_once` are on the way at a time."""
        left = iter(sent)

        async def follow() -> None:
            async with httpx.AsyncClient(timeout=30) as http:
                for shot in left:
                    self.answers.append(await self._answer(http, shot))

        async with asyncio.TaskGroup() as group:
            for _ in range(num_at_once):
                group.create_task(follow())

    async def flush(self) -> None:
        """Fills every cache of grammars with small ones."""
        async with httpx.AsyncClient(timeout=30) as http:
            for number in range(NUM_SMALL):
                body = _body(GrammarSpec(kind=GrammarKind.REGEX, text=f"{time.monotonic_ns()}-{number}"))
                answer = await self._answer(http, Shot(name="small", body=body))
                if answer.status != 200:
                    self.answers.append(replace(answer, name=f"a small grammar, {answer.status}"))

    async def _answer(self, http: httpx.AsyncClient, shot: Shot) -> Answer:
        headers = {"Content-Type": "application/json", "X-Tenant": next(self._tenants)}
        start_s = time.monotonic()
        try:
            response = await http.post(f"{self._url}/v1/chat/completions", content=shot.body, headers=headers)
            status, retry_after, text = response.status_code, response.headers.get("Retry-After"), response.text
        except httpx.HTTPError as error:
            status, retry_after, text = 0, None, repr(error)
        return Answer(name=shot.name, seconds=time.monotonic() - start_s, status=status, retry_after=retry_after, text=text)


async def processes(cluster: ServedCluster) -> dict[str, list[int]]:
    """Name -> process ids. Those that check are replaced after a slow check, so only their number stays."""
    found = {name: list((await cluster.pids(name)).values()) for name in (GATEWAY, ROUTER, REPLICA)}
    children = [child for pid in found[GATEWAY] for child in psutil.Process(pid).children()]
    found["checks"] = [child.pid for child in children if any("check_process" in part for part in child.cmdline())]
    return found


def memory(pids: dict[str, list[int]]) -> dict[str, int]:
    return {name: sum(psutil.Process(pid).memory_full_info().uss for pid in mine) for name, mine in pids.items()}


def process_faults(before: dict[str, list[int]], after: dict[str, list[int]]) -> list[str]:
    lost = [f"{name}: processes {before[name]} became {after[name]}" for name in (GATEWAY, ROUTER, REPLICA) if before[name] != after[name]]
    if len(before["checks"]) != len(after["checks"]):
        lost.append(f"{len(before['checks'])} check processes became {len(after['checks'])}")
    return lost


def memory_faults(before: dict[str, int], after: dict[str, int]) -> list[str]:
    return [
        f"{name} kept {(after[name] - size) / 2**20:.0f} MiB"
        for name, size in before.items()
        if after[name] - size > MOST_LEFT_SHARE * size + MOST_LEFT_BYTES
    ]


async def run(cluster: ServedCluster, seconds: float, names: Sequence[str], seed: int) -> list[str]:
    await cluster.wait_ready()
    bomber = Bomber(cluster.url)
    passes = [shots(number, names) for number in range(1, 5)]
    first_pids = await processes(cluster)
    async with OrdinaryStreams(cluster.url, NUM_STREAMS, seed) as streams:
        await asyncio.sleep(WARM_UP_S)
        alone = [await _span(asyncio.sleep(seconds))]
        single = [await _span(bomber.send(passes[0], 1))]
        several = [await _span(bomber.send(passes[1], NUM_AT_ONCE))]
        await asyncio.sleep(SETTLE_S)
        await bomber.flush()
        before_pids = await processes(cluster)
        before = memory(before_pids)
        single.append(await _span(bomber.send(passes[2], 1)))
        several.append(await _span(bomber.send(passes[3], NUM_AT_ONCE)))
        await asyncio.sleep(SETTLE_S)
        await bomber.flush()
        alone.append(await _span(asyncio.sleep(seconds)))
        after_pids = await processes(cluster)
        after = memory(after_pids)
    _print_answers(bomber.answers)
    faults = [fault for answer in bomber.answers if (fault := answer.fault)] + streams.faults
    faults += _gap_faults(streams, alone, single, several)
    print("| process | MiB before | after |\n|---|---|---|")
    for name, size in before.items():
        print(f"| {name} | {size / 2**20:.0f} | {after[name] / 2**20:.0f} |")
    faults += process_faults(first_pids, after_pids) + memory_faults(before, after)
    try:
        await cluster.wait_ready(30.0)
    except TimeoutError as error:
        faults.append(f"something is still held: {error}")
    return faults


async def _span(work: Awaitable[object]) -> Span:
    """Awaits it; when it began and ended."""
    start_s = time.monotonic()
    await work
    return start_s, time.monotonic()


def _print_answers(answers: Sequence[Answer]) -> None:
    print("| bomb | answered with, after s |\n|---|---|")
    for name in dict.fromkeys(answer.name for answer in answers):
        print(f"| {name} | {', '.join(f'{mine.outcome} {mine.seconds:.2f}' for mine in answers if mine.name == name)} |")


def _gap_faults(streams: OrdinaryStreams, alone: list[Span], single: list[Span], several: list[Span]) -> list[str]:
    print(f"{streams.num_answers} ordinary answers\n| gaps of ordinary streams, ms | p50 | p99 | longest |\n|---|---|---|---|")
    highest = {}
    spans = {
        "alone": alone,
        "beside bombs": [*single, *several],
        "alone, before": alone[:1],
        "alone, after": alone[1:],
        "beside one at a time": single,
        f"beside {NUM_AT_ONCE} at once": several,
    }
    for name, mine in spans.items():
        gaps = [1e3 * gap for start_s, end_s in mine for gap in streams.between(start_s, end_s)]
        highest[name] = percentile(gaps, 0.99)
        print(f"| {name} | {percentile(gaps, 0.5):.1f} | {highest[name]:.1f} | {max(gaps, default=0):.1f} |")
    if highest["beside bombs"] < MOST_GAP_RATIO * highest["alone"]:
        return []
    return [f"gaps (p99) beside bombs are {highest['beside bombs'] / max(highest['alone'], 1e-9):.1f} times those alone"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of ordinary streams alone, before and after the bombs")
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} bombs and 5 seconds, to test this script")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("build/grammar-bombs"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a cluster must not be left behind
    names = QUICK if arguments.quick else list(BOMBS)
    seconds = 5.0 if arguments.quick else arguments.seconds
    print(hardware_line(1))
    with ServedCluster(arguments.folder.resolve(), Layout(num_replicas=1, num_gateways=1, is_default_model=True)) as cluster:
        faults = asyncio.run(run(cluster, seconds, names, arguments.seed))
    print(*(f"FAULT {fault}" for fault in faults), sep="\n")
    if not faults:
        print("every bomb was answered in time, and nothing was left of them")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
