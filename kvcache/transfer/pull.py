"""The receiving side of one handoff: a thread that renews the lease, pulls the missing blocks, and reports completion."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcache.handoff import HandoffFailed, KVHandoff, plan_heads
from kvcache.ownership import TransferRef, Transfers
from kvcache.tensors import KVTensors
from kvcache.transfer.link import Connector, KVBatch, LinkLost, SourceSession
from kvcache.wire import WireFormat, parse_layout, unpack

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOutcome:
    """How a pull ended: with the tokens that the source generated, or with the reason why KV must be recomputed here."""

    output_ids: tuple[int, ...] = ()
    error: str | None = None
    num_bytes: int = 0
    transfer_s: float = 0.0
    """Time spent moving bytes."""
    overlap_s: float = 0.0
    """The part of `transfer_s` before the prefill ended."""


@dataclass(frozen=True, slots=True)
class _Reservation:
    ref: TransferRef
    block_ids: tuple[int, ...]
    first: int


@dataclass(slots=True)
class _Part:
    """Heads pulled from one share: (first, end) among the source rank's and this rank's heads; None for all heads of each layer."""

    session: SourceSession
    source: tuple[int, int] | None
    target: tuple[int, int] | None
    cursor: int
    is_computed: bool = False


class HandoffPull:
    """Owns the thread of one handoff on one rank. The thread always ends, with one outcome, because every wait in it has a deadline.

    Until `reserve` it only renews the lease. It writes a block only between `begin` and `end` of its own transfer in, so it writes
    nothing after that transfer closed. Rank 0's pull renews the lease until the pulls of all ranks have ended, and then tells the
    source that the handoff is complete.
    """

    def __init__(
        self,
        handoff: KVHandoff,
        heads: tuple[int, int] | None,
        *,
        connector: Connector,
        transfers: Transfers,
        kv: KVTensors,
        on_end: Callable[[PullOutcome], None],
        deadline_s: float,
        is_lead: bool = True,
        num_others: int = 0,
    ) -> None:
        """`heads` are this rank's KV heads, (first, end); None for a replica of one rank whose layers differ in their number.

        `on_end` is called from the thread. `deadline_s` bounds the wait for a source that answers but computes nothing new.
        `is_lead` is True on rank 0, which learns of the `num_others` other ranks' pulls through `note_other`.
        """
        self._handoff, self._heads = handoff, heads
        self._connector, self._transfers, self._kv = connector, transfers, kv
        self._on_end, self._deadline_s = on_end, deadline_s
        self._is_lead, self._num_others = is_lead, num_others
        self._changed = threading.Condition()
        self._reservation: _Reservation | None = None
        self._cancelled: str | None = None
        self._others: list[PullOutcome] = []
        self._sessions: dict[str, SourceSession] = {}  # address -> session
        self._num_bytes, self._transfer_s, self._overlap_s = 0, 0.0, 0.0
        self.outcome: PullOutcome | None = None
        self._thread = threading.Thread(target=self._run, name="kv-pull", daemon=True)
        self._thread.start()

    def reserve(self, ref: TransferRef, block_ids: Sequence[int], first: int) -> None:
        """Sets the target blocks: `block_ids` receive positions `first ..` of the handoff's table, under the transfer in `ref`."""
        with self._changed:
            self._reservation = _Reservation(ref, tuple(block_ids), first)
            self._changed.notify_all()

    def note_other(self, outcome: PullOutcome) -> None:
        """Reports how another rank's pull of the same handoff ended. May be called from any thread."""
        if outcome.error is not None:
            self.cancel(f"on another rank: {outcome.error}")
            return
        with self._changed:
            self._others.append(outcome)
            self._changed.notify_all()

    def cancel(self, reason: str) -> None:
        """Cuts the links; the thread then ends, and the source's lease expires. May be called from any thread."""
        with self._changed:
            self._cancelled = self._cancelled or reason
            self._changed.notify_all()
            sessions = list(self._sessions.values())
        for session in sessions:
            session.close()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            output_ids = self._pull()
        except Exception as error:  # noqa: BLE001 - after any error KV is recomputed here, which needs an outcome
            outcome = PullOutcome(error=self._cancelled or str(error) or repr(error))
        else:
            outcome = PullOutcome(
                output_ids=output_ids,
                num_bytes=self._num_bytes + sum(other.num_bytes for other in self._others),
                transfer_s=max([self._transfer_s, *(other.transfer_s for other in self._others)]),
                overlap_s=max([self._overlap_s, *(other.overlap_s for other in self._others)]),
            )
        with self._changed:
            sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            session.close(is_reusable=outcome.error is None)
        self.outcome = outcome
        self._on_end(outcome)

    def _pull(self) -> tuple[int, ...]:
        # The lease belongs to the source's rank 0, which has the first share.
        lease = self._connect(self._handoff.shares[0].address) if self._is_lead else None
        parts = self._parts()
        reservation = self._wait_for_reservation()
        output_ids: tuple[int, ...] = ()
        for part in parts:
            part.cursor = reservation.first
        end = reservation.first + len(reservation.block_ids)
        last_progress_s = time.monotonic()
        while unfinished := [part for part in parts if not part.is_computed or part.cursor < end]:
            for part in unfinished:
                start_s = time.monotonic()
                batch = self._read(part)
                if batch.num_blocks:
                    self._write(reservation, part, batch)
                    self._note(batch, start_s)
                    part.cursor += batch.num_blocks
                if batch.num_blocks or batch.is_computed != part.is_computed:
                    last_progress_s = time.monotonic()
                part.is_computed, output_ids = batch.is_computed, batch.output_ids
                self._transfers.renew(reservation.ref)
                if lease is not None and part.session is not lease:
                    lease.renew(self._handoff)
            if time.monotonic() - last_progress_s > self._deadline_s:
                raise HandoffFailed(f"the source computed nothing new for {self._deadline_s:.0f} s")
        if lease is not None:
            self._wait_for_others(lease, reservation)
            self._say_done(lease)
        return output_ids

    def _parts(self) -> list[_Part]:
        """The shares to pull from. Raises ValueError when no share has a head."""
        shares = self._handoff.shares
        if self._heads is None:
            if len(shares) != 1:
                raise HandoffFailed("the layers differ in KV heads, so one share must hold them all")
            return [_Part(self._connect(shares[0].address), None, None, 0)]
        slices = plan_heads(shares, *self._heads)
        return [_Part(self._connect(shares[one.share].address), one.source, one.target, 0) for one in slices]

    def _wait_for_others(self, lease: SourceSession, reservation: _Reservation) -> None:
        while True:
            with self._changed:
                self._check_cancelled()
                if len(self._others) == self._num_others:
                    return
                has_changed = self._changed.wait(self._handoff.lease_s / 3)
            if not has_changed:
                lease.renew(self._handoff)
                self._transfers.renew(reservation.ref)

    def _say_done(self, lease: SourceSession) -> None:
        try:
            lease.finish(self._handoff)
        except (HandoffFailed, LinkLost) as error:
            logger.info("lease %d was read completely, but its source could not be told: %s", self._handoff.lease, error)

    def _connect(self, address: str) -> SourceSession:
        if (known := self._sessions.get(address)) is not None:
            return known
        session = self._connector.connect(address)
        with self._changed:
            self._sessions[address] = session
            self._check_cancelled()
        return session

    def _check_cancelled(self) -> None:
        if self._cancelled is not None:
            raise HandoffFailed(self._cancelled)

    def _wait_for_reservation(self) -> _Reservation:
        while True:
            with self._changed:
                self._check_cancelled()
                if self._reservation is not None:
                    return self._reservation
                has_changed = self._changed.wait(self._handoff.lease_s / 3)
            if not has_changed:
                for session in list(self._sessions.values()):
                    session.renew(self._handoff)

    def _read(self, part: _Part) -> KVBatch:
        form = WireFormat(layout=self._kv.layout, layers=self._handoff.layers, heads=part.source)
        return part.session.read(self._handoff, form, part.cursor, min(1.0, self._handoff.lease_s / 3))

    def _write(self, reservation: _Reservation, part: _Part, batch: KVBatch) -> None:
        start = batch.first - reservation.first
        block_ids = reservation.block_ids[start : start + batch.num_blocks]
        if start < 0 or len(block_ids) != batch.num_blocks:
            raise HandoffFailed(f"the source sent blocks {batch.first} to {batch.first + batch.num_blocks - 1}, not those asked for")
        form = WireFormat(layout=parse_layout(batch.layout_id), layers=self._handoff.layers, heads=part.target)
        with self._transfers.using(reservation.ref) as is_open:
            if not is_open:
                raise HandoffFailed("the target blocks are no longer reserved")
            unpack(self._kv, block_ids, batch.data, form)
            if batch.data.is_cuda:
                _synchronize(batch)

    def _note(self, batch: KVBatch, start_s: float) -> None:
        elapsed_s = max(0.0, time.monotonic() - start_s - batch.waited_s)
        self._num_bytes += batch.data.numel() * batch.data.itemsize
        self._transfer_s += elapsed_s
        if not batch.is_computed:
            self._overlap_s += elapsed_s


def _synchronize(batch: KVBatch) -> None:
    """Waits for the device, because the copy may still be writing the blocks."""
    import torch

    torch.cuda.synchronize(batch.data.device)
