"""The ownership of blocks in every order of events (tests/ownership_exploration.py), and planted bugs that this must find."""

from __future__ import annotations

import os

import pytest

from kvcache.ownership import Direction, KVOwnership, TransferRef
from tests.ownership_exploration import explore

IS_EXHAUSTIVE = bool(os.environ.get("MANTA_TEST_EXHAUSTIVE"))


class FreesWhileRead(KVOwnership):
    """Planted: frees what is closed without waiting for reads and writes under way."""

    def collect(self) -> list[TransferRef]:
        for transfer in self._transfers.values():
            if transfer.is_closing or transfer.deadline_s <= 0:
                transfer.num_busy = 0
        return super().collect()

    def end(self, ref: TransferRef) -> None:
        if ref.number in self._transfers and self._transfers[ref.number].num_busy:
            super().end(ref)


class TakesNoReference(KVOwnership):
    """Planted: a transfer relies on the request's reference, so an abort frees what is being read or written."""

    def open(self, direction: Direction, block_ids, **settings) -> TransferRef:
        ref = super().open(direction, block_ids, **settings)
        self.pool.release(block_ids)
        return ref

    def collect(self) -> list[TransferRef]:
        for transfer in self._transfers.values():
            if (transfer.is_closing or transfer.deadline_s <= 0) and transfer.num_busy == 0:
                transfer.block_ids = ()
        return super().collect()


class IgnoresEpochs(KVOwnership):
    """Planted: a restarted replica takes messages to the one before it for its own."""

    def begin(self, ref: TransferRef) -> bool:
        return super().begin(TransferRef(ref.number, self.epoch))

    def end(self, ref: TransferRef) -> None:
        super().end(TransferRef(ref.number, self.epoch))


class FreesTwice(KVOwnership):
    """Planted: every message that closes a transfer lets go of its blocks."""

    def close(self, ref: TransferRef) -> bool:
        transfer = self._transfers.get(ref.number)
        if ref.epoch == self.epoch and transfer is not None and transfer.is_closing:
            self.pool.release(transfer.block_ids)
        return super().close(ref)


class NeverExpires(KVOwnership):
    """Planted: a lease that nobody takes stays for ever."""

    def collect(self) -> list[TransferRef]:
        for number, transfer in self._transfers.items():
            if transfer.direction is Direction.OUT and transfer.deadline_s <= 0 and not transfer.is_closing:
                self._transfers[number].deadline_s = 2.0
        return super().collect()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requests", "num_faults", "least_states"), [("A", 2, 9_000), ("AB", 2 if IS_EXHAUSTIVE else 1, 30_000)], ids=["one", "two"]
)
def test_ownership_in_every_order_of_events_is_safe_and_ends(requests: str, num_faults: int, least_states: int) -> None:
    num_states, num_ends = explore(KVOwnership, requests, num_faults)
    assert num_states > least_states, "the model lost most of its events"
    assert num_ends > 0


@pytest.mark.parametrize(
    ("kind", "finding"),
    [
        (FreesWhileRead, "free while it is read or written"),
        (TakesNoReference, "1 references, 2 holders"),
        (IgnoresEpochs, "read from blocks that hold something else"),
        (FreesTwice, "0 references, 1 holders"),
        (NeverExpires, "a run can go on for ever"),
    ],
)
def test_exploration_with_a_planted_bug_finds_it(kind: type[KVOwnership], finding: str) -> None:
    with pytest.raises(AssertionError, match=finding):
        explore(kind, "A" if kind is NeverExpires else "AB", 1)
