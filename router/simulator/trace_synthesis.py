"""Generates the requests of a trace from its shape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, log
from random import Random

from router.simulator.trace_shapes import RequestFamily, TraceShape
from router.simulator.traces import HASH_BLOCK_TOKENS

_CATCH_UP_REQUESTS = 20
"""Number of requests over which a deficit in the share of prefixes is corrected."""
_LENGTH_CLASS = log(1.2)
"""Prompts whose lengths differ by less than this factor (its logarithm) may continue the same earlier prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeRequest:
    """One line of a trace."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]
    """One id per block of 512 prompt tokens, the last one partial; two prompts share a prefix as far as their ids are equal."""


def synthesize(
    shape: TraceShape, num_requests: int, *, seed: int = 0, rate_per_s: float | None = None, prefix_share: float | None = None
) -> Iterator[MadeRequest]:
    """Yields `num_requests` requests in order of arrival; the same arguments give the same requests.

    `rate_per_s` and `prefix_share` replace those of the shape. At twice the rate all gaps are half as long, so bursts keep their form.
    A prefix share that the shape cannot reach, because too few prompts may continue others, is approached as far as possible.
    Raises ValueError with the name of an invalid argument.
    """
    share = shape.prefix_share if prefix_share is None else prefix_share
    speedup = 1.0 if rate_per_s is None else rate_per_s / shape.rate_per_s
    if num_requests < 1:
        raise ValueError(f"requests must be at least 1, got {num_requests}")
    if speedup <= 0:
        raise ValueError(f"rate must be above 0, got {rate_per_s}")
    if not 0 <= share < 1:
        raise ValueError(f"prefix share must be at least 0 and below 1, got {share}")
    random = Random(seed)
    families = [_PromptFamily(family, random) for family in shape.families]
    bounds = list(accumulate(family.share for family in shape.families))
    num_blocks = num_found = next_id = 0
    for number, arrival_s in enumerate(_arrivals(shape, num_requests, random), 1):
        family = families[min(bisect_left(bounds, random.random() * bounds[-1]), len(families) - 1)]
        num_prompt_tokens = round(family.shape.prompt_tokens.value(random.random()))
        num_output_tokens = round(family.shape.output_tokens.value(random.random()))
        size = ceil(num_prompt_tokens / HASH_BLOCK_TOKENS)
        num_blocks += size
        num_behind = share * num_blocks - num_found
        chance = share + num_behind / (_CATCH_UP_REQUESTS * num_blocks / number) if share else 0.0
        known = family.known_prefix(num_prompt_tokens, chance, arrival_s - shape.gap_to_parent_s.value(random.random()))
        num_found += len(known)
        hash_ids = known + tuple(range(next_id, next_id + size - len(known)))
        next_id += size - len(known)
        family.add(hash_ids[: num_prompt_tokens // HASH_BLOCK_TOKENS], arrival_s)
        made_s = arrival_s if shape.tick_s is None else arrival_s // shape.tick_s * shape.tick_s
        yield MadeRequest(
            arrival_s=made_s / speedup, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens, hash_ids=hash_ids
        )


def _arrivals(shape: TraceShape, num_requests: int, random: Random) -> Iterator[float]:
    """Arrival times from 0 on. Gaps are short within bursts and long between them, both exponential, with the shape's mean and
    variation."""
    mean_s = 1 / shape.rate_per_s
    short_s = 1 / shape.burst_rate_per_s if shape.burst_rate_per_s is not None else mean_s / 2
    square_s = (shape.gap_variation**2 + 1) * mean_s**2 / 2
    long_s = (square_s - short_s**2) / (mean_s - short_s) - short_s
    long_share = (mean_s - short_s) / (long_s - short_s)
    now_s = 0.0
    for _ in range(num_requests):
        yield now_s
        now_s -= log(1 - random.random()) * (long_s if random.random() < long_share else short_s)


class _PromptFamily:
    """Owns the prompts of one family generated so far, which later ones may continue."""

    def __init__(self, shape: RequestFamily, random: Random) -> None:
        self.shape = shape
        self._random = random
        self._prompts: dict[int, list[tuple[float, tuple[int, ...]]]] = {}  # length class -> (arrival, full blocks), oldest first
        self._common: tuple[int, ...] = ()

    def known_prefix(self, num_prompt_tokens: int, chance: float, parent_s: float) -> tuple[int, ...]:
        """The blocks that a new prompt shares with an earlier one: with probability `chance` a prompt of about `parent_s`, else only the
        family's common blocks."""
        num_full = num_prompt_tokens // HASH_BLOCK_TOKENS
        common = self._common[:num_full]
        if self.shape.new_blocks is None:
            return common
        num_new = round(self.shape.new_blocks.value(self._random.random()))
        num_wanted = min(num_full, ceil(num_prompt_tokens / HASH_BLOCK_TOKENS) - num_new)
        if self._random.random() >= chance or num_wanted <= len(common):
            return common
        middle = _length_class(num_wanted)
        for step in (0, 1, -1, 2, -2, 3, -3):
            prompts = self._prompts.get(middle + step)
            if prompts:
                _, blocks = prompts[min(bisect_left(prompts, (parent_s,)), len(prompts) - 1)]
                return blocks[:num_wanted]
        return common

    def add(self, full_blocks: tuple[int, ...], arrival_s: float) -> None:
        if not self._common:
            self._common = full_blocks[: self.shape.num_common_blocks]
        if full_blocks and self.shape.new_blocks is not None:
            self._prompts.setdefault(_length_class(len(full_blocks)), []).append((arrival_s, full_blocks))


def _length_class(num_blocks: int) -> int:
    return int(log(num_blocks) / _LENGTH_CLASS)
