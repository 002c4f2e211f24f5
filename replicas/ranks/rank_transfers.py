"""Rank 0's orders to the other ranks about handoffs, and their answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from kvcache.handoff import HeadShare, KVHandoff
from kvcache.ownership import TransferRef
from kvcache.transfer.pull import PullOutcome
from replicas.ranks.ranks import RankLost, Ranks
from replicas.ranks.transfer_message import (
    CancelPull,
    Close,
    Closed,
    Completed,
    Computed,
    Offer,
    Order,
    Pulled,
    Reserve,
    Serves,
    StartPull,
    decode,
    encode,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pull:
    on_end: Callable[[PullOutcome], None]
    num_left: int


class RankTransfers:
    """Owns rank 0's view of the other ranks' transfers: which are open on which ranks, and which pulls have not ended.

    Implements `OtherRanks` for a replica with several ranks. Answers arrive in the threads that listen to the ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Must be constructed before the ranks are set up: their first answers come while they load."""
        self._ranks = ranks
        self._shares: dict[int, HeadShare] = {}  # rank -> its heads
        self._open: dict[TransferRef, set[int]] = {}  # transfer -> ranks that have not closed it
        self._told: set[TransferRef] = set()  # transfers that the ranks were told to close
        self._pulls: dict[int, _Pull] = {}  # number -> pull that has not ended on all ranks
        self._numbers = count()
        self._changed: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        ranks.when_answered(self._take)

    @property
    def shares(self) -> tuple[HeadShare, ...]:
        return tuple(share for _, share in sorted(self._shares.items()))

    def when_changed(self, call: Callable[[], None]) -> None:
        self._changed = call

    def offer(self, ref: TransferRef, block_ids: Sequence[int], num_tokens: int) -> None:
        self._note_open(ref)
        self._send(Offer(ref, tuple(block_ids), num_tokens))

    def note_computed(self, ref: TransferRef, num_tokens: int) -> None:
        self._send(Computed(ref, num_tokens))

    def complete(self, ref: TransferRef, output_ids: Sequence[int]) -> None:
        self._send(Completed(ref, tuple(output_ids)))

    def start_pull(self, handoff: KVHandoff, on_end: Callable[[PullOutcome], None]) -> int:
        number = next(self._numbers)
        with self._lock:
            self._pulls[number] = _Pull(on_end, self._ranks.size - 1)
        self._send(StartPull.of(number, handoff))
        return number

    def reserve(self, pull: int, ref: TransferRef, block_ids: Sequence[int], first: int) -> None:
        self._note_open(ref)
        self._send(Reserve(pull, ref, tuple(block_ids), first))

    def cancel(self, pull: int, reason: str) -> None:
        with self._lock:
            self._pulls.pop(pull, None)
        self._send(CancelPull(pull, reason))

    def try_close(self, ref: TransferRef) -> bool:
        """True also once a rank is lost: all ranks are then killed, and this replica runs no more steps."""
        with self._lock:
            if not self._open.get(ref) or self._ranks.is_lost:
                self._open.pop(ref, None)
                self._told.discard(ref)
                return True
            is_told = ref in self._told
            self._told.add(ref)
        if not is_told:
            self._send(Close(ref))
        return False

    def check(self) -> None:
        self._ranks.check()

    def _note_open(self, ref: TransferRef) -> None:
        with self._lock:
            self._open[ref] = set(range(1, self._ranks.size))

    def _send(self, order: Order) -> None:
        try:
            self._ranks.send_order(encode(order))
        except RankLost as lost:
            logger.debug("%s was not sent: %s", type(order).__name__, lost)  # the next step raises RankLost

    def _take(self, rank: int, payload: bytes) -> None:
        """Takes an answer. Raises ValueError for a message that is no answer."""
        match decode(payload):
            case Serves(share):
                self._shares[rank] = share
            case Closed(ref):
                with self._lock:
                    left = self._open.get(ref, set())
                    left.discard(rank)
                if not left:
                    self._changed()
            case Pulled(pull, outcome):
                self._end_pull(pull, outcome)
            case other:
                raise ValueError(f"a rank answers with {other!r}")

    def _end_pull(self, number: int, outcome: PullOutcome) -> None:
        """Notes that one rank's part of a pull ended; ignored if the pull was cancelled."""
        with self._lock:
            pull = self._pulls.get(number)
            if pull is None:
                return
            pull.num_left -= 1
            if pull.num_left == 0:
                del self._pulls[number]
        pull.on_end(outcome)
