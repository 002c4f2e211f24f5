"""Numbered changes of a replica's prefix cache, for mirrors of it (the router's index)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from kvcache.hashing import BlockKey


class Tier(StrEnum):
    """Where a cached block lives."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class BlockStored:
    """`key` became findable; its prefix ends with `parent` (the root key for a first block)."""

    key: BlockKey
    parent: BlockKey
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class BlockEvicted:
    """`key` is no longer findable in `tier`."""

    key: BlockKey
    tier: Tier = Tier.DEVICE


KVEvent = BlockStored | BlockEvicted


class KVEventLog:
    """Owns the last `capacity` events. Event numbers start at 0 without gaps; old events are dropped."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._events: deque[KVEvent] = deque(maxlen=capacity)
        self._next = 0

    @property
    def next_number(self) -> int:
        return self._next

    def append(self, event: KVEvent) -> None:
        self._events.append(event)
        self._next += 1

    def since(self, number: int) -> tuple[KVEvent, ...] | None:
        """Events `number` and later, oldest first. None when some of them were dropped or `number` is beyond the next one: the reader
        must then resync."""
        first = self._next - len(self._events)
        if number < first or number > self._next:
            return None
        # From the right: a deque is a list of chunks, and walking a full one from the left would dominate the cost.
        newest_first = list(islice(reversed(self._events), self._next - number))
        newest_first.reverse()
        return tuple(newest_first)
