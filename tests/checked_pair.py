"""A prefill and a decode engine with checked invariants, and random operations on both with every freed block poisoned."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvcache.tensors import KVTensors
from replicas.engine.disaggregated import DisaggregatedEngine
from replicas.request import FinishReason
from replicas.sampling_params import SamplingParams
from tests.engine_harness import requests_for


class CheckedPair(DisaggregatedEngine):
    """Invariants of both engines, for the harness."""

    def check(self) -> None:
        self.prefill.check()
        self.decode.check()

    def assert_nothing_is_held(self) -> None:
        for engine in (self.prefill, self.decode):
            assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
            assert not engine.has_work


class RandomOperations:
    """Adds, cancels, expiries of either side and steps; every answer must be what is expected, as far as it goes."""

    def __init__(
        self, pair: CheckedPair, prompts: Sequence[Sequence[int]], expected: Sequence[list[int]], memories: Sequence[Sequence[KVTensors]]
    ) -> None:
        """`memories` are those of all ranks of the prefill engine, then of the decode engine."""
        self.num_whole = 0
        self._pair, self._prompts, self._expected, self._memories = pair, prompts, expected, memories
        self._chance = random.Random(8)
        self._running: dict[Any, int] = {}  # key -> which prompt
        self._said: dict[Any, list[int]] = {}
        self._poisoned: list[set[int]] = [set(), set()]

    def run(self, count: int, params: SamplingParams) -> None:
        """So many of them, and then whatever ends what is left."""
        for number in range(count):
            draw = self._chance.random()
            if draw < 0.12 and len(self._running) < 8:
                self._add(f"{number}-", params)
            elif draw < 0.15 and self._running:
                self._pair.cancel(self._chance.choice(list(self._running)))
            elif draw < 0.2:
                ownership = self._chance.choice([self._pair.prefill, self._pair.decode]).handoffs.ownership
                for transfer in list(ownership._transfers.values())[:1]:
                    transfer.deadline_s = 0.0
            else:
                self._step()
            self._poison()
        for key in list(self._running):
            self._pair.cancel(key)
        while self._pair.has_work:
            self._step()
            self._poison()

    def _add(self, prefix: str, params: SamplingParams) -> None:
        which = self._chance.randrange(len(self._prompts))
        (request,) = requests_for([self._prompts[which]], params, prefix=prefix)
        request = replace(request, priority=self._chance.randrange(2))
        self._pair.add_request(request)
        self._running[request.key], self._said[request.key] = which, []

    def _step(self) -> None:
        for item in self._pair.step().progress:
            self._said[item.key] += item.token_ids
            if item.finish_reason is not None:
                expected, tokens = self._expected[self._running.pop(item.key)], self._said.pop(item.key)
                assert item.finish_reason in (FinishReason.LENGTH, FinishReason.CANCELLED), item.error
                assert tokens == expected[: len(tokens)]
                assert len(tokens) == len(expected) or item.finish_reason is FinishReason.CANCELLED
                self.num_whole += item.finish_reason is FinishReason.LENGTH
        self._pair.check()

    def _poison(self) -> None:
        """Fills what became free since the last call."""
        for engine, memories, known in zip((self._pair.prefill, self._pair.decode), self._memories, self._poisoned, strict=True):
            free = set(engine.scheduler.pool._blank)
            if fresh := free - known:
                for kv in memories:
                    kv.fill(sorted(fresh), float("nan"))
            known.clear()
            known.update(free)
