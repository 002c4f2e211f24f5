"""Chat streams without anything special, in a closed loop, and the gaps between their parts."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass
from types import TracebackType

import httpx

from tests.chaos.served_cluster import MODEL
from tests.prompts import conversations

MIN_TOKENS, MAX_TOKENS = 64, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Between two parts of one stream. The time to the first part is none."""

    ended_s: float
    seconds: float


class OrdinaryStreams:
    """Owns clients that each ask for the next answer as soon as the last one ended. Use as a context manager; leaving it hangs up."""

    def __init__(self, url: str, num_clients: int, seed: int) -> None:
        self._url = url
        self._num_clients = num_clients
        self._dice = random.Random(seed)
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._questions = [first for first, _ in conversations()]
        self.gaps: list[Gap] = []
        self.num_answers = 0
        self.faults: list[str] = []

    async def __aenter__(self) -> OrdinaryStreams:
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self._num_clients)]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def between(self, start_s: float, end_s: float) -> list[float]:
        """Seconds of the gaps that ended within these times of `time.monotonic`."""
        return [gap.seconds for gap in self.gaps if start_s <= gap.ended_s < end_s]

    async def _client(self) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            while True:
                try:
                    await self._answer(http)
                except httpx.HTTPError as error:
                    self.faults.append(f"an ordinary stream broke: {error!r}")
                    await asyncio.sleep(0.5)

    async def _answer(self, http: httpx.AsyncClient) -> None:
        number = next(self._numbers)
        question = self._questions[number % len(self._questions)]
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"{number}. {question[:400]}"}],
            "max_tokens": self._dice.randint(MIN_TOKENS, MAX_TOKENS),
            "seed": number,
            "ignore_eos": True,
            "stream": True,
        }
        last_s: float | None = None
        async with http.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise httpx.HTTPError(f"status {response.status_code}: {(await response.aread()).decode()[:200]}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                part = json.loads(line[6:])
                if "error" in part:
                    raise httpx.HTTPError(str(part["error"])[:200])
                if not any(choice["delta"].get("content") for choice in part["choices"]):
                    continue
                now_s = time.monotonic()
                if last_s is not None:
                    self.gaps.append(Gap(ended_s=now_s, seconds=now_s - last_s))
                last_s = now_s
        self.num_answers += 1
