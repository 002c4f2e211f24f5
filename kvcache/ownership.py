"""Which blocks are read or written for another replica, and when they may be freed. Bookkeeping only, no torch."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvcache.block_pool import BlockPool


class BlockState(Enum):
    FREE = "free"
    """No request and no transfer refers to it; it may still be findable."""
    HELD = "held"
    """A request refers to it, no transfer does."""
    LEASED = "leased"
    """A transfer may read it for another replica; a request may refer to it too."""
    LOADING = "loading"
    """A transfer may write it; its content is not valid yet."""


class Direction(Enum):
    OUT = "out"
    IN = "in"


class TransferRef(NamedTuple):
    """Identifies one transfer during one life (epoch) of its replica. A ref of an older epoch is never open."""

    number: int
    epoch: int


class Transfers(ABC):
    """Permission to read or write blocks for another replica: every read or write asks first. All methods may be called from any
    thread."""

    lease_s: float

    @abstractmethod
    def begin(self, ref: TransferRef) -> bool:
        """Called before each read of leased blocks or write to loading ones. False: the transfer is closed, do not touch its blocks."""

    @abstractmethod
    def end(self, ref: TransferRef) -> None:
        """Called after each read or write that `begin` allowed."""

    @abstractmethod
    def renew(self, ref: TransferRef) -> bool:
        """Extends the transfer to one lease from now. False when it is closed or unknown."""

    def is_expected(self, ref: TransferRef) -> bool:
        """Whether the transfer is unknown here but may be opened soon, so that a reader should wait for it."""
        return False

    @abstractmethod
    def close(self, ref: TransferRef) -> bool:
        """Stops all later reads and writes. True for the call that closed the transfer; repeated calls do nothing."""

    @contextmanager
    def using(self, ref: TransferRef) -> Iterator[bool]:
        """Calls `begin` and `end` around a block of code; yields the result of `begin`."""
        has_begun = self.begin(ref)
        try:
            yield has_begun
        finally:
            if has_begun:
                self.end(ref)


def _closed_everywhere(_: TransferRef) -> bool:
    """The default for a replica of one rank, where no other rank can touch a block."""
    return True


@dataclass(slots=True)
class _Transfer:
    direction: Direction
    block_ids: tuple[int, ...]
    lease_s: float
    deadline_s: float
    priority: int
    on_closing: Callable[[], None] | None
    num_busy: int = 0  # reads or writes under way
    is_closing: bool = False


@dataclass(slots=True)
class OwnershipCounters:
    num_opened: int = 0
    num_expired: int = 0
    num_renewed: int = 0


@dataclass(slots=True)
class KVOwnership(Transfers):
    """Owns the transfers of one replica's pool. Requests and transfers refer to blocks independently.

    Always: a block is freed only after both released it; no read or write begins once a transfer closes, and its blocks
    are freed only after the last read or write has ended, on every rank (the link is closed first, then the blocks are
    freed); each transfer releases its blocks exactly once; every transfer closes by its deadline unless it is renewed.

    Only the thread that owns the pool calls `open`, `collect` and `check`. The other methods may be called from any thread: they only
    change transfers, and the next `collect` frees the blocks.
    """

    pool: BlockPool
    epoch: int
    lease_s: float
    clock: Callable[[], float]
    try_close_elsewhere: Callable[[TransferRef], bool] = _closed_everywhere
    """`collect` calls it for each closed transfer until it is True: no other rank touches that transfer's blocks, now or later."""
    counters: OwnershipCounters = field(default_factory=OwnershipCounters)
    _transfers: dict[int, _Transfer] = field(default_factory=dict)  # number -> transfer
    _leased: Counter[int] = field(default_factory=Counter)  # block_id -> number of transfers out
    _loading: set[int] = field(default_factory=set)
    _next_number: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(
        self,
        direction: Direction,
        block_ids: Sequence[int],
        *,
        lease_s: float | None = None,
        priority: int = 0,
        on_closing: Callable[[], None] | None = None,
    ) -> TransferRef:
        """Opens a transfer of blocks that a request holds now, for `lease_s` (None: `self.lease_s`) unless it is renewed.

        `on_closing` is called once, when the transfer closes, to cut the link. A block may be in several transfers out, or in one
        transfer in and no other.
        """
        for block_id in block_ids:
            assert self.pool.ref_count(block_id) > 0, f"block {block_id} is transferred but not held"
            state = self.state(block_id)
            assert state is BlockState.HELD or (state is BlockState.LEASED and direction is Direction.OUT), (
                f"block {block_id} is {state.value}: it cannot be moved {direction.value}"
            )
            self.pool.retain(block_id)
        if direction is Direction.OUT:
            self._leased.update(block_ids)
        else:
            self._loading.update(block_ids)
        with self._lock:
            number = self._next_number
            self._next_number += 1
            length_s = self.lease_s if lease_s is None else lease_s
            self._transfers[number] = _Transfer(direction, tuple(block_ids), length_s, self.clock() + length_s, priority, on_closing)
        self.counters.num_opened += 1
        return TransferRef(number, self.epoch)

    def begin(self, ref: TransferRef) -> bool:
        with self._lock:
            transfer = self._open_transfer(ref)
            if transfer is None:
                return False
            transfer.num_busy += 1
            return True

    def end(self, ref: TransferRef) -> None:
        with self._lock:
            transfer = self._transfers[ref.number]
            assert transfer.num_busy > 0, f"transfer {ref.number} ends a read or write that never began"
            transfer.num_busy -= 1

    def renew(self, ref: TransferRef) -> bool:
        """Moves the deadline to one lease from now. False when the transfer is closed, past its deadline or of another epoch."""
        with self._lock:
            transfer = self._open_transfer(ref)
            if transfer is None:
                return False
            transfer.deadline_s = self.clock() + transfer.lease_s
            self.counters.num_renewed += 1
            return True

    def close(self, ref: TransferRef) -> bool:
        with self._lock:
            transfer = self._transfers.get(ref.number) if ref.epoch == self.epoch else None
            if transfer is None or transfer.is_closing:
                return False
            transfer.is_closing = True
        if transfer.on_closing is not None:
            transfer.on_closing()
        return True

    def is_open(self, ref: TransferRef) -> bool:
        with self._lock:
            return self._open_transfer(ref) is not None

    def has_let_go(self, ref: TransferRef) -> bool:
        """Whether the transfer is closed, no rank still reads or writes for it, and its blocks are released."""
        with self._lock:
            return ref.epoch != self.epoch or ref.number not in self._transfers

    @property
    def has_transfers(self) -> bool:
        """Whether any transfer is open or not yet collected."""
        return bool(self._transfers)

    @property
    def num_leases(self) -> int:
        """Number of transfers out that have not released their blocks."""
        with self._lock:
            return sum(transfer.direction is Direction.OUT for transfer in self._transfers.values())

    def collect(self) -> list[TransferRef]:
        """Closes transfers past their deadline and releases the blocks of closed ones that nothing touches any more. Returns the transfers
        that released their blocks."""
        now_s = self.clock()
        with self._lock:
            expired = [n for n, t in self._transfers.items() if t.deadline_s <= now_s and not t.is_closing]
        for number in expired:
            if self.close(TransferRef(number, self.epoch)):
                self.counters.num_expired += 1
        with self._lock:
            closed = [(n, t) for n, t in self._transfers.items() if t.is_closing]
        closed = [(n, t) for n, t in closed if self.try_close_elsewhere(TransferRef(n, self.epoch))]
        with self._lock:
            done = [(n, t) for n, t in closed if t.num_busy == 0]
            for number, _ in done:
                del self._transfers[number]
        for _, transfer in done:
            if transfer.direction is Direction.OUT:
                self._leased.subtract(transfer.block_ids)
            else:
                self._loading.difference_update(transfer.block_ids)
            self.pool.release(transfer.block_ids, transfer.priority)
        return [TransferRef(number, self.epoch) for number, _ in done]

    def state(self, block_id: int) -> BlockState:
        if block_id in self._loading:
            return BlockState.LOADING
        if self._leased[block_id]:
            return BlockState.LEASED
        return BlockState.HELD if self.pool.ref_count(block_id) else BlockState.FREE

    def refs(self) -> list[TransferRef]:
        with self._lock:
            return [TransferRef(number, self.epoch) for number in self._transfers]

    def tables(self) -> list[tuple[int, ...]]:
        """The block tables of all transfers, for `BlockPool.check_holders`."""
        with self._lock:
            return [t.block_ids for t in self._transfers.values()]

    def check(self) -> None:
        """Raises AssertionError when an invariant of this class does not hold."""
        numbers: dict[Direction, Counter[int]] = {direction: Counter() for direction in Direction}
        for transfer in self._transfers.values():
            assert transfer.num_busy >= 0, "a transfer has a negative count of reads and writes"
            numbers[transfer.direction].update(transfer.block_ids)
        for block_id, count in numbers[Direction.IN].items():
            assert count == 1, f"block {block_id} is written by two transfers"
            assert not numbers[Direction.OUT][block_id], f"block {block_id} is read and written"
        for block_id in numbers[Direction.IN] | numbers[Direction.OUT]:
            assert self.pool.ref_count(block_id) > 0, f"block {block_id} is free and in a transfer"
        assert self._loading == set(numbers[Direction.IN]), "the set of loading blocks is wrong"
        assert +self._leased == numbers[Direction.OUT], "the count of leased blocks is wrong"

    def _open_transfer(self, ref: TransferRef) -> _Transfer | None:
        """The transfer, if reads, writes and renewals may still begin."""
        transfer = self._transfers.get(ref.number) if ref.epoch == self.epoch else None
        if transfer is None or transfer.is_closing or transfer.deadline_s <= self.clock():
            return None
        return transfer
