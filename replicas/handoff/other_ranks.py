"""Rank 0's orders to the other ranks of its replica about handoffs, and the null object of a replica with one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvcache.handoff import HeadShare, KVHandoff
from kvcache.ownership import TransferRef
from kvcache.transfer.pull import PullOutcome


class OtherRanks(Protocol):
    """The other ranks in handoffs; each holds its own heads of the same blocks. Called from the engine's thread, between steps.

    Orders arrive in order, and after the steps sent before them: a rank that is told of computed tokens has computed them.
    No call but `check` fails for a lost rank.
    """

    @property
    def shares(self) -> tuple[HeadShare, ...]:
        """The other ranks' heads and the addresses at which they can be read, in the order of ranks."""
        ...

    def when_changed(self, call: Callable[[], None]) -> None:
        """Registers `call`, made from another thread when `try_close` may have become True."""
        ...

    def offer(self, ref: TransferRef, block_ids: Sequence[int], num_tokens: int) -> None:
        """Like `KVSource.offer`, on every rank."""
        ...

    def note_computed(self, ref: TransferRef, num_tokens: int) -> None: ...

    def complete(self, ref: TransferRef, output_ids: Sequence[int]) -> None: ...

    def start_pull(self, handoff: KVHandoff, on_end: Callable[[PullOutcome], None]) -> int:
        """Every rank begins to pull its heads; returns the pull's number. `on_end` is called for each rank, from another thread."""
        ...

    def reserve(self, pull: int, ref: TransferRef, block_ids: Sequence[int], first: int) -> None:
        """Like `HandoffPull.reserve`, on every rank."""
        ...

    def cancel(self, pull: int, reason: str) -> None:
        """Cancels a pull on every rank; its outcomes are ignored."""
        ...

    def try_close(self, ref: TransferRef) -> bool:
        """Closes a transfer on every rank; True once none reads or writes for it, now or later. Until then call it again."""
        ...

    def check(self) -> None:
        """Raises RankLost once a rank is lost."""
        ...


class NoOtherRanks:
    """Null object of a replica with one rank."""

    shares: tuple[HeadShare, ...] = ()

    def when_changed(self, call: Callable[[], None]) -> None: ...

    def offer(self, ref: TransferRef, block_ids: Sequence[int], num_tokens: int) -> None: ...

    def note_computed(self, ref: TransferRef, num_tokens: int) -> None: ...

    def complete(self, ref: TransferRef, output_ids: Sequence[int]) -> None: ...

    def start_pull(self, handoff: KVHandoff, on_end: Callable[[PullOutcome], None]) -> int:
        return 0

    def reserve(self, pull: int, ref: TransferRef, block_ids: Sequence[int], first: int) -> None: ...

    def cancel(self, pull: int, reason: str) -> None: ...

    def try_close(self, ref: TransferRef) -> bool:
        return True

    def check(self) -> None: ...
