"""Transfers on a rank other than 0: rank 0 owns the blocks, and opens and closes the transfers. Bookkeeping only, no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvcache.ownership import TransferRef, Transfers


@dataclass(slots=True)
class _Gate:
    on_closing: Callable[[], None]
    num_busy: int = 0  # reads or writes under way
    is_closing: bool = False


class TransferGate(Transfers):
    """Owns which transfers are open on this rank. Rank 0 keeps the leases; a transfer is open here until rank 0 closes it.

    Always: no read or write begins once a transfer closes, and `on_closed` is called once for each transfer that was
    opened, after its last read or write has ended. So rank 0 may free the blocks when every rank has reported this.
    """

    def __init__(self, lease_s: float, on_closed: Callable[[TransferRef], None]) -> None:
        """`on_closed` is called from the thread that closed the transfer or ended its last read or write."""
        self.lease_s = lease_s
        self._on_closed = on_closed
        self._gates: dict[TransferRef, _Gate] = {}
        self._latest: TransferRef | None = None
        self._lock = threading.Lock()

    def open(self, ref: TransferRef, on_closing: Callable[[], None] = lambda: None) -> None:
        """Opens a transfer; calls come in the order of numbers. `on_closing` is called once, when it closes, to cut the link."""
        with self._lock:
            assert self._is_later(ref), f"transfer {ref.number} is opened twice, or too late"
            self._gates[ref] = _Gate(on_closing)
            self._latest = ref

    def begin(self, ref: TransferRef) -> bool:
        with self._lock:
            gate = self._gates.get(ref)
            if gate is None or gate.is_closing:
                return False
            gate.num_busy += 1
            return True

    def end(self, ref: TransferRef) -> None:
        with self._lock:
            gate = self._gates[ref]
            assert gate.num_busy > 0, f"transfer {ref.number} ends a read or write that never began"
            gate.num_busy -= 1
            is_over = self._drop_if_over(ref, gate)
        if is_over:
            self._on_closed(ref)

    def renew(self, ref: TransferRef) -> bool:
        with self._lock:
            gate = self._gates.get(ref)
            return gate is not None and not gate.is_closing

    def is_expected(self, ref: TransferRef) -> bool:
        """Whether rank 0 may open it later: a receiver can hear of an offer before this rank does."""
        with self._lock:
            return self._is_later(ref)

    def close(self, ref: TransferRef) -> bool:
        with self._lock:
            gate = self._gates.get(ref)
            if gate is None or gate.is_closing:
                return False
            gate.is_closing = True
            is_over = self._drop_if_over(ref, gate)
        gate.on_closing()
        if is_over:
            self._on_closed(ref)
        return True

    def _is_later(self, ref: TransferRef) -> bool:
        latest = self._latest
        return ref.number >= 0 if latest is None else ref.epoch == latest.epoch and ref.number > latest.number

    def _drop_if_over(self, ref: TransferRef, gate: _Gate) -> bool:
        if not gate.is_closing or gate.num_busy:
            return False
        del self._gates[ref]
        return True
