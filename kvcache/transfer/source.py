"""The source side of handoffs: offers, their readable blocks, and reads. Transports call it from their threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcache.handoff import HandoffFailed
from kvcache.ownership import TransferRef, Transfers
from kvcache.tensors import KVTensors
from kvcache.transfer.link import KVBatch
from kvcache.wire import WireFormat, num_values_per_block, pack, parse_layout, why_not_form, wire_layout

MAX_BATCH_BYTES = 16 << 20


@dataclass(slots=True)
class _Offer:
    block_ids: tuple[int, ...]
    num_tokens: int
    num_readable_tokens: int = 0
    output_ids: tuple[int, ...] | None = None  # None until the prefill has ended


_NOT_YET = _Offer((), 0)
"""Stands for an offer that has not reached this rank yet."""


@dataclass(slots=True)
class SourceCounters:
    num_bytes: int = 0
    num_early_bytes: int = 0
    """Bytes read while the prefill was still running."""
    num_finished: int = 0
    num_withdrawn: int = 0


class KVSource:
    """Owns the offers of one rank. A block is readable only after the step that filled it has ended on this rank.

    A read copies blocks to a message, so a slow peer never keeps the blocks in use. Only the thread that runs the steps calls `offer`,
    `note_computed` and `complete`.
    """

    def __init__(self, transfers: Transfers, kv: KVTensors) -> None:
        self.transfers = transfers
        self.kv = kv
        self.counters = SourceCounters()
        self._offers: dict[int, _Offer] = {}  # number of the transfer -> offer
        self._changed = threading.Condition()

    def offer(self, ref: TransferRef, block_ids: Sequence[int], num_tokens: int) -> None:
        """Offers the blocks that will hold `num_tokens` tokens, under the transfer `ref`, which must call `wake` when it closes."""
        with self._changed:
            self._offers[ref.number] = _Offer(tuple(block_ids), num_tokens)
            self._changed.notify_all()

    def note_computed(self, ref: TransferRef, num_tokens: int) -> None:
        """Makes the KV of the first `num_tokens` tokens readable. Renews the lease, so that it survives a slow prefill."""
        with self._changed:
            if (offer := self._offers.get(ref.number)) is not None:
                offer.num_readable_tokens = min(num_tokens, offer.num_tokens)
                self.transfers.renew(ref)
                self._changed.notify_all()

    def complete(self, ref: TransferRef, output_ids: Sequence[int]) -> None:
        """Reports that the prefill has ended and generated these tokens."""
        with self._changed:
            if (offer := self._offers.get(ref.number)) is not None:
                offer.output_ids = tuple(output_ids)
                self._changed.notify_all()

    def withdraw(self, ref: TransferRef) -> bool:
        """Closes an offer even while it is read; readers get HandoffFailed. False when it was closed already."""
        is_withdrawn = self.transfers.close(ref)
        self.counters.num_withdrawn += is_withdrawn
        return is_withdrawn

    def forget(self, refs: Sequence[TransferRef]) -> None:
        """Drops the offers of transfers that released their blocks."""
        with self._changed:
            for ref in refs:
                self._offers.pop(ref.number, None)

    def read(self, ref: TransferRef, form: WireFormat, first: int, wait_s: float) -> KVBatch:
        """The readable blocks from position `first` on, after waiting at most `wait_s` for one; renews the lease.

        `form.layout` is the receiver's. Raises HandoffFailed when the transfer is closed or `form` or `first` is out of range.
        """
        form = WireFormat(layout=wire_layout(self.kv.layout, form.layout.id), layers=form.layers, heads=form.heads)
        if problem := why_not_form(self.kv, form):
            raise HandoffFailed(problem)
        start_s = time.monotonic()
        until_s = start_s + wait_s
        with self._changed:
            while True:
                offer = self._offer_of(ref) or _NOT_YET
                if not 0 <= first <= len(offer.block_ids) and offer is not _NOT_YET:
                    raise HandoffFailed(f"lease {ref.number} has {len(offer.block_ids)} blocks; block {first} was asked for")
                block_ids, output_ids = offer.block_ids[first : self._num_readable(offer)], offer.output_ids
                left_s = until_s - time.monotonic()
                if block_ids or output_ids is not None or left_s <= 0:
                    break
                self._changed.wait(min(left_s, self.transfers.lease_s / 4))
        waited_s = time.monotonic() - start_s
        most = max(1, MAX_BATCH_BYTES // (num_values_per_block(self.kv, form) * self.kv.dtype.itemsize))
        block_ids = block_ids[:most]
        data = self._pack(ref, block_ids, form)
        num_bytes = data.numel() * data.itemsize
        with self._changed:
            self.counters.num_bytes += num_bytes
            if output_ids is None:
                self.counters.num_early_bytes += num_bytes
        return KVBatch(
            first=first,
            num_blocks=len(block_ids),
            data=data,
            layout_id=form.layout.id,
            is_computed=output_ids is not None,
            output_ids=output_ids or (),
            waited_s=waited_s,
        )

    def renew(self, ref: TransferRef) -> None:
        """Renews the lease. Raises HandoffFailed when the transfer is closed."""
        with self._changed:
            self._offer_of(ref)

    def finish(self, ref: TransferRef) -> None:
        """Closes the transfer, because the receiver has everything. A repeated or late call changes nothing."""
        if self.transfers.close(ref):
            self.counters.num_finished += 1

    def _offer_of(self, ref: TransferRef) -> _Offer | None:
        """The offer, its lease renewed. None when it may still reach this rank; raises HandoffFailed when it is closed or unknown."""
        is_expected = self.transfers.is_expected(ref)
        if self.transfers.renew(ref) and (offer := self._offers.get(ref.number)) is not None:
            return offer
        if not is_expected:
            raise HandoffFailed(f"lease {ref.number} is not open at the source: expired, withdrawn, taken, or of another life")
        return None

    def _pack(self, ref: TransferRef, block_ids: Sequence[int], form: WireFormat) -> torch.Tensor:
        if not block_ids:
            return torch.empty(0, dtype=self.kv.dtype)
        with self.transfers.using(ref) as is_open:
            if not is_open:
                raise HandoffFailed(f"lease {ref.number} closed while it was read")
            data = pack(self.kv, block_ids, form)
            if data.is_cuda:
                torch.cuda.synchronize(data.device)  # until then the copy still reads the blocks
            return data

    def _num_readable(self, offer: _Offer) -> int:
        if offer.num_readable_tokens == offer.num_tokens:
            return len(offer.block_ids)
        return offer.num_readable_tokens // self.kv.block_size

    def wake(self) -> None:
        """Makes waiting readers check again whether their transfer is open."""
        with self._changed:
            self._changed.notify_all()


def parse_form(layers: Sequence[int], heads: Sequence[int] | None, layout_id: str) -> WireFormat:
    """A wire format from a message's fields. Raises ValueError for invalid ones."""
    if len(layers) != 2 or (heads is not None and len(heads) != 2):
        raise ValueError("layers and heads are pairs: first, end")
    return WireFormat(
        layout=parse_layout(layout_id),
        layers=(int(layers[0]), int(layers[1])),
        heads=None if heads is None else (int(heads[0]), int(heads[1])),
    )
