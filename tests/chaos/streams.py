"""Streams whose text is known in advance, and the arrival times of their parts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import httpx

from tests.chaos.served_cluster import MODEL

REPEATED = " there was a river, and a house beside the river,"


@dataclass(slots=True, kw_only=True)
class Stream:
    """One request and what came of it. It is whole when the server said that it ended."""

    index: int
    max_tokens: int
    num_prompt_repeats: int = 0
    """Of a sentence behind the prompt, about a dozen tokens each."""
    body: dict[str, object] = field(default_factory=dict)
    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    arrivals_s: list[float] = field(default_factory=list)
    sent_s: float = 0.0
    answer_id: str | None = None
    num_cached_tokens: int = 0

    @property
    def is_whole(self) -> bool:
        return self.error is None and self.finish_reason is not None

    def longest_gap_s(self, after_s: float) -> float:
        """The longest time without a part that ended after `after_s`."""
        times = [self.sent_s, *self.arrivals_s]
        return max((later - earlier for earlier, later in pairwise(times) if later > after_s), default=0.0)

    async def run(self, http: httpx.AsyncClient, url: str) -> Stream:
        body = {
            "model": MODEL,
            "prompt": f"Tale number {self.index}, in which nothing is lost:" + REPEATED * self.num_prompt_repeats,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "seed": 1000 + self.index,
            "temperature": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.body,
        }
        self.sent_s = time.monotonic()
        try:
            async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
                if response.status_code != 200:
                    self.error = f"{response.status_code}: {(await response.aread()).decode()[:300]}"
                    return self
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line[6:]))
        except httpx.HTTPError as error:
            self.error = repr(error)
        return self

    def _take(self, part: dict[str, object]) -> None:
        if "error" in part:
            self.error = str(part["error"])
            return
        self.answer_id = str(part["id"])
        choices = part["choices"]
        assert isinstance(choices, list)
        for choice in choices:
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            self.arrivals_s.append(time.monotonic())
        usage = part.get("usage")
        if isinstance(usage, dict):
            self.num_tokens = usage["completion_tokens"]
            self.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


class Load:
    """Some streams at once. `golden` are the same streams as they end when nothing is disturbed."""

    def __init__(self, url: str, num_streams: int, max_tokens: int, golden: Sequence[Stream] = (), num_prompt_repeats: int = 0) -> None:
        self.streams = [Stream(index=index, max_tokens=max_tokens, num_prompt_repeats=num_prompt_repeats) for index in range(num_streams)]
        self._golden = golden
        self._url = url
        self._tasks: list[asyncio.Task[Stream]] = []
        self._left: set[int] = set()
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(300.0), limits=httpx.Limits(max_connections=None))

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(stream.run(self._http, self._url)) for stream in self.streams]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    async def wait_begun(self, num_streams: int | None = None) -> None:
        """Returns when so many streams, or all, have brought something, or ended."""
        wanted = len(self.streams) if num_streams is None else num_streams
        while sum(bool(stream.arrivals_s) or task.done() for stream, task in zip(self.streams, self._tasks, strict=True)) < wanted:
            await asyncio.sleep(0.02)

    def hang_up(self, indices: Collection[int]) -> None:
        """Their clients leave in the middle: nothing more is expected of these streams."""
        for index in indices:
            self._left.add(index)
            self._tasks[index].cancel()

    @property
    def is_ended(self) -> bool:
        return all(task.done() for task in self._tasks)

    async def wait_ended(self) -> list[Stream]:
        """All whose clients stayed."""
        return list(await asyncio.gather(*(task for index, task in enumerate(self._tasks) if index not in self._left)))

    def faults(self) -> list[str]:
        """What differs from the golden streams; nothing when all is as it should be."""
        found = []
        for stream, golden in zip(self.streams, self._golden, strict=False):
            if stream.index in self._left:
                continue
            if not stream.is_whole:
                found.append(f"stream {stream.index} broke after {len(stream.text)} characters: {stream.error or 'no ending'}")
            elif stream.text != golden.text or stream.num_tokens != golden.num_tokens:
                same = next((i for i, (a, b) in enumerate(zip(stream.text, golden.text, strict=False)) if a != b), -1)
                found.append(
                    f"stream {stream.index}: {stream.num_tokens} tokens for {golden.num_tokens}, text differs from character {same}"
                )
        return found


async def golden_streams(url: str, num_streams: int, max_tokens: int, num_prompt_repeats: int = 0) -> list[Stream]:
    """Raises RuntimeError when even undisturbed streams break."""
    async with Load(url, num_streams, max_tokens, num_prompt_repeats=num_prompt_repeats) as load:
        streams = await load.wait_ended()
    broken = [stream.error for stream in streams if not stream.is_whole or stream.num_tokens != max_tokens]
    if broken:
        raise RuntimeError(f"undisturbed streams broke: {broken[:3]}")
    return streams
