"""What rank 0 says to the other ranks of its replica about KV that is handed over, and what a replica without any hears."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvcache.handoff import HeadShare, KVHandoff
from kvcache.ownership import TransferRef
from kvcache.transfer.pull import PullOutcome


class OtherRanks(Protocol):
    """Each holds its own heads of the same blocks. Called from the engine's thread, between steps.

    What is said arrives in order, and after the steps before it: a rank that hears of computed tokens has computed them.
    A lost rank is no error of a call; `check` tells.
    """

    @property
    def shares(self) -> tuple[HeadShare, ...]:
        """Where the other ranks' heads can be read, in the order of ranks."""
        ...

    def when_changed(self, call: Callable[[], None]) -> None:
        """`call` is made, from another thread, when `try_close` may have become True."""
        ...

    def offer(self, ref: TransferRef, block_ids: Sequence[int], num_tokens: int) -> None:
        """As `KVSource.offer`, on every rank."""
        ...

    def note_computed(self, ref: TransferRef, num_tokens: int) -> None: ...

    def complete(self, ref: TransferRef, output_ids: Sequence[int]) -> None: ...

    def start_pull(self, handoff: KVHandoff, on_end: Callable[[PullOutcome], None]) -> int:
        """Every rank begins to bring its heads; returns the pull's number. `on_end` is called for each, from another thread."""
        ...

    def reserve(self, pull: int, ref: TransferRef, block_ids: Sequence[int], first: int) -> None:
        """As `HandoffPull.reserve`."""
        ...

    def cancel(self, pull: int, reason: str) -> None:
        """Its ends are of no interest any more."""
        ...

    def try_close(self, ref: TransferRef) -> bool:
        """True once no rank reads or writes for this transfer, now or later; until then it is on its way, so ask again."""
        ...

    def check(self) -> None:
        """Raises RankLost once a rank is lost."""
        ...


class NoOtherRanks:
    """Of a replica with one rank."""

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
