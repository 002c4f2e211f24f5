"""Handoffs of a rank above 0: offers and pulls its own KV heads as rank 0 orders."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvcache.handoff import HeadShare
from kvcache.ownership import TransferRef
from kvcache.tensors import KVTensors
from kvcache.transfer.link import Transport
from kvcache.transfer.pull import HandoffPull, PullOutcome
from kvcache.transfer.remote import RemoteConnector
from kvcache.transfer.server import TransferServer
from kvcache.transfer.source import KVSource
from kvcache.transfer_gate import TransferGate
from replicas.handoff.handoffs import PULL_DEADLINE_S
from replicas.ranks.channel import ChannelClosed
from replicas.ranks.transfer_message import (
    Answer,
    CancelPull,
    Close,
    Closed,
    Completed,
    Computed,
    Offer,
    Pulled,
    Reserve,
    Serves,
    StartPull,
    decode,
    encode,
)

logger = logging.getLogger(__name__)


class FollowerTransfers:
    """Owns this rank's transfer server and its pulls; rank 0 decides which blocks move, and until when.

    The thread that runs the steps also executes the orders, in the order in which rank 0 sent both. So tokens that an order
    calls computed are computed here too.
    """

    def __init__(
        self,
        kv: KVTensors,
        kv_heads: range,
        transports: Sequence[Transport],
        *,
        host: str,
        lease_s: float,
        deadline_s: float,
        send: Callable[[bytes], None],
    ) -> None:
        """`send` sends answers to rank 0, from any thread; the first is sent at once."""
        self._send_bytes = send
        self._heads = (kv_heads.start, kv_heads.stop)
        self._gate = TransferGate(lease_s, self._note_closed)
        self._source = KVSource(self._gate, kv)
        self._server = TransferServer(self._source, {one.name: one for one in transports}, host)
        self._connector = RemoteConnector(transports, kv, deadline_s)
        self._pulls: dict[int, HandoffPull] = {}
        self._loads: dict[int, TransferRef] = {}  # pull -> its incoming transfer, once blocks are reserved
        self._lock = threading.Lock()
        self._send(Serves(HeadShare(first=kv_heads.start, end=kv_heads.stop, address=self._server.address)))

    def obey(self, payload: bytes) -> None:
        """Executes an order. Raises ValueError for a message that is no order."""
        match decode(payload):
            case Offer(ref, block_ids, num_tokens):
                self._source.offer(ref, block_ids, num_tokens)  # before the gate opens: a reader of an open transfer needs the offer
                self._gate.open(ref, self._source.wake)
                self._source.wake()
            case Computed(ref, num_tokens):
                self._source.note_computed(ref, num_tokens)
            case Completed(ref, output_ids):
                self._source.complete(ref, output_ids)
            case StartPull() as order:
                self._start_pull(order)
            case Reserve() as order:
                self._reserve(order)
            case CancelPull(number, reason):
                with self._lock:
                    pull = self._pulls.get(number)
                if pull is not None:
                    pull.cancel(reason)
            case Close(ref):
                self._gate.close(ref)
            case other:
                raise ValueError(f"rank 0 orders {other!r}")

    def close(self) -> None:
        """Aborts every transfer."""
        with self._lock:
            pulls = list(self._pulls.values())
        for pull in pulls:
            pull.cancel("the rank closes")
        self._connector.close()
        self._server.close()

    def _start_pull(self, order: StartPull) -> None:
        with self._lock:  # the pull must be in the table before it can end
            self._pulls[order.pull] = HandoffPull(
                order.handoff,
                self._heads,
                connector=self._connector,
                transfers=self._gate,
                kv=self._source.kv,
                on_end=partial(self._end_pull, order.pull),
                deadline_s=PULL_DEADLINE_S,
                is_lead=False,
            )

    def _reserve(self, order: Reserve) -> None:
        """Gives a pull its blocks. If the pull has already ended, its transfer closes, which rank 0 is told."""
        self._gate.open(order.ref)
        with self._lock:
            if (pull := self._pulls.get(order.pull)) is not None:
                self._loads[order.pull] = order.ref
                pull.reserve(order.ref, order.block_ids, order.first)
        if pull is None:
            self._gate.close(order.ref)

    def _end_pull(self, number: int, outcome: PullOutcome) -> None:
        """Runs in the pull's thread, after its last write."""
        with self._lock:
            del self._pulls[number]
            ref = self._loads.pop(number, None)
        if ref is not None:
            self._gate.close(ref)
        self._send(Pulled(number, outcome))

    def _note_closed(self, ref: TransferRef) -> None:
        self._source.forget([ref])
        self._send(Closed(ref))

    def _send(self, answer: Answer) -> None:
        try:
            self._send_bytes(encode(answer))
        except ChannelClosed as error:
            logger.debug("rank 0 has gone: %s", error)  # this process ends with it
