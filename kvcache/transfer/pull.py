"""The taking side of one handoff: a thread that keeps the lease alive, brings the blocks that are missing, and says done."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvcache.handoff import HandoffFailed, HeadSlice, KVHandoff
from kvcache.ownership import KVOwnership, TransferRef
from kvcache.tensors import KVTensors
from kvcache.transfer.link import Connector, KVBatch, LinkLost, SourceSession
from kvcache.wire import WireFormat, parse_layout, unpack

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOutcome:
    """How a pull ended: with the source's first tokens, or with the reason why its KV must be computed here."""

    output_ids: tuple[int, ...] = ()
    error: str | None = None
    num_bytes: int = 0
    transfer_s: float = 0.0
    """Time in which bytes moved."""
    overlap_s: float = 0.0
    """The part of it before the prefill ended."""


@dataclass(frozen=True, slots=True)
class _Reservation:
    ref: TransferRef
    block_ids: tuple[int, ...]
    first: int


class HandoffPull:
    """Owns the thread of one handoff. It always ends, with one outcome, because every wait in it has a deadline.

    Until `reserve` it only renews the lease. It writes a block only between `begin` and `end` of its own transfer in, so
    nothing is written after that one closed.
    """

    def __init__(
        self,
        handoff: KVHandoff,
        slices: Sequence[HeadSlice],
        *,
        connector: Connector,
        ownership: KVOwnership,
        kv: KVTensors,
        on_end: Callable[[], None],
        deadline_s: float,
    ) -> None:
        """`slices` say which heads come from which share (see `plan_heads`). `deadline_s` bounds the wait for a source
        that answers but computes nothing new."""
        self._handoff, self._slices = handoff, tuple(slices)
        self._connector, self._ownership, self._kv = connector, ownership, kv
        self._on_end, self._deadline_s = on_end, deadline_s
        self._changed = threading.Condition()
        self._reservation: _Reservation | None = None
        self._cancelled: str | None = None
        self._sessions: list[SourceSession] = []
        self._num_bytes, self._transfer_s, self._overlap_s = 0, 0.0, 0.0
        self.outcome: PullOutcome | None = None
        self._thread = threading.Thread(target=self._run, name="kv-pull", daemon=True)
        self._thread.start()

    def reserve(self, ref: TransferRef, block_ids: Sequence[int], first: int) -> None:
        """`block_ids` receive the positions `first ..` of the handoff's table, under the transfer in `ref`."""
        with self._changed:
            self._reservation = _Reservation(ref, tuple(block_ids), first)
            self._changed.notify_all()

    def cancel(self, reason: str) -> None:
        """Cuts the links; the thread ends soon, and the source's lease is left to expire. From any thread."""
        with self._changed:
            self._cancelled = self._cancelled or reason
            self._changed.notify_all()
            sessions = list(self._sessions)
        for session in sessions:
            session.close()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            output_ids = self._pull()
        except (HandoffFailed, LinkLost, ValueError, RuntimeError) as error:  # a failed copy is a RuntimeError of torch
            outcome = PullOutcome(error=self._cancelled or str(error))
        else:
            outcome = PullOutcome(output_ids=output_ids, num_bytes=self._num_bytes, transfer_s=self._transfer_s, overlap_s=self._overlap_s)
        with self._changed:
            sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.close(is_reusable=outcome.error is None)
        self.outcome = outcome
        self._on_end()

    def _pull(self) -> tuple[int, ...]:
        sessions = {one.share: self._connect(self._handoff.shares[one.share].address) for one in self._slices}
        reservation = self._wait_for_reservation()
        output_ids: tuple[int, ...] = ()
        cursors = [reservation.first] * len(self._slices)
        is_computed = [False] * len(self._slices)
        end = reservation.first + len(reservation.block_ids)
        last_progress_s = time.monotonic()
        while not all(is_computed) or any(cursor < end for cursor in cursors):
            for index, one in enumerate(self._slices):
                if is_computed[index] and cursors[index] >= end:
                    continue
                start_s = time.monotonic()
                batch = self._read(sessions[one.share], one, cursors[index])
                if batch.num_blocks:
                    self._write(reservation, one, batch)
                    self._note(batch, start_s)
                    cursors[index] += batch.num_blocks
                if batch.num_blocks or batch.is_computed != is_computed[index]:
                    last_progress_s = time.monotonic()
                is_computed[index], output_ids = batch.is_computed, batch.output_ids
                self._ownership.renew(reservation.ref)
            if time.monotonic() - last_progress_s > self._deadline_s:
                raise HandoffFailed(f"the source computed nothing new for {self._deadline_s:.0f} s")
        self._say_done(sessions.values())
        return output_ids

    def _say_done(self, sessions: Iterable[SourceSession]) -> None:
        try:
            for session in sessions:
                session.finish(self._handoff)
        except (HandoffFailed, LinkLost) as error:
            logger.info("lease %d was read whole, but its source was not told: %s", self._handoff.lease, error)

    def _connect(self, address: str) -> SourceSession:
        session = self._connector.connect(address)
        with self._changed:
            self._sessions.append(session)
            if self._cancelled is not None:
                raise HandoffFailed(self._cancelled)
        return session

    def _wait_for_reservation(self) -> _Reservation:
        while True:
            with self._changed:
                if self._cancelled is not None:
                    raise HandoffFailed(self._cancelled)
                if self._reservation is not None:
                    return self._reservation
                has_changed = self._changed.wait(self._handoff.lease_s / 3)
            if not has_changed:
                for session in list(self._sessions):
                    session.renew(self._handoff)

    def _read(self, session: SourceSession, one: HeadSlice, first: int) -> KVBatch:
        form = WireFormat(layout=self._kv.layout, layers=self._handoff.layers, heads=one.source)
        return session.read(self._handoff, form, first, min(1.0, self._handoff.lease_s / 3))

    def _write(self, reservation: _Reservation, one: HeadSlice, batch: KVBatch) -> None:
        start = batch.first - reservation.first
        block_ids = reservation.block_ids[start : start + batch.num_blocks]
        if start < 0 or len(block_ids) != batch.num_blocks:
            raise HandoffFailed(f"the source sent blocks {batch.first} to {batch.first + batch.num_blocks - 1}, not those asked for")
        form = WireFormat(layout=parse_layout(batch.layout_id), layers=self._handoff.layers, heads=one.target)
        with self._ownership.using(reservation.ref) as is_open:
            if not is_open:
                raise HandoffFailed("the blocks that were to be written are no longer reserved")
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
    """Until the device is done, the copy still writes the blocks."""
    import torch

    torch.cuda.synchronize(batch.data.device)
