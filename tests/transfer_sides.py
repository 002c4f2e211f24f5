"""Both sides of a handoff in one process, without engines: blocks, offers, pulls, and the transport between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from kvcache.block_pool import BlockPool
from kvcache.handoff import HeadShare, KVHandoff
from kvcache.ownership import Direction, KVOwnership, TransferRef
from kvcache.spec import KVGroupSpec, KVLayout
from kvcache.tensors import KVTensors
from kvcache.transfer.in_process import InProcessConnector
from kvcache.transfer.link import Connector, Transport
from kvcache.transfer.object_store import ObjectStoreTransport
from kvcache.transfer.process_group import ProcessGroupTransport
from kvcache.transfer.pull import HandoffPull, PullOutcome
from kvcache.transfer.remote import RemoteConnector
from kvcache.transfer.server import TransferServer
from kvcache.transfer.source import KVSource
from tests.memory_store import MemoryStore

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, NUM_HEADS = 4, 8, 4
DEADLINE_S = 20.0


class Side:
    """One replica's blocks, half of a pair."""

    def __init__(self, layout: KVLayout, num_heads: int = NUM_HEADS, lease_s: float = 30.0) -> None:
        group = KVGroupSpec(layers=(0, 1), kind="full", window=None, num_kv_heads=num_heads, k_dim=8, v_dim=8)
        self.kv = KVTensors([group], layout=layout, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU)
        self.kv.fill(range(NUM_BLOCKS), float("nan"))
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.ownership = KVOwnership(pool=self.pool, epoch=1, lease_s=lease_s, clock=time.monotonic)
        self.source = KVSource(self.ownership, self.kv)

    def offer(self, num_tokens: int) -> tuple[TransferRef, list[int]]:
        """Blocks with random content, leased; nothing readable yet."""
        block_ids = self.pool.try_allocate(-(-num_tokens // BLOCK_SIZE))
        assert block_ids is not None
        for layer in (0, 1):
            for tensor in self.kv.canonical(layer):
                tensor[block_ids] = torch.randn_like(tensor[block_ids])
        ref = self.ownership.open(Direction.OUT, block_ids, on_closing=self.source.wake)
        self.source.offer(ref, block_ids, num_tokens)
        return ref, block_ids


def make_handoff(ref: TransferRef, num_tokens: int, *shares: HeadShare, lease_s: float = 30.0) -> KVHandoff:
    return KVHandoff(
        fingerprint="", layout_id="", block_size=BLOCK_SIZE, dtype="float32", num_tokens=num_tokens, tokens_digest="", layers=(0, 2),
        block_ids=(), epoch=ref.epoch, lease=ref.number, lease_s=lease_s, shares=shares,
    )  # fmt: skip


Serve = Callable[[Side], str]


@contextmanager
def wired(kind: str) -> Iterator[tuple[Serve, Callable[[Side], Connector]]]:
    """Serves a source, and makes a connector for a receiver; `kind` is in-process, process-group or object-store."""
    with ExitStack() as stack:
        if kind == "in-process":
            registry = InProcessConnector()
            yield lambda side: registry.serve(side.source), lambda side: registry
            return

        store = MemoryStore()

        def transport_of_a_side() -> Transport:
            return ProcessGroupTransport(CPU) if kind == "process-group" else ObjectStoreTransport(store, CPU)

        def serve(side: Side) -> str:
            transport = transport_of_a_side()
            server = TransferServer(side.source, {transport.name: transport})
            stack.callback(server.close)
            return server.address

        def connector(side: Side) -> Connector:
            made = RemoteConnector([transport_of_a_side()], side.kv)
            stack.callback(made.close)
            return made

        yield serve, connector
    assert store.objects == {}, "the store still holds a message"


class Pulling:
    """A pull and what tells of its end."""

    def __init__(
        self, side: Side, handoff: KVHandoff, connector: Connector, *, heads: tuple[int, int] | None = (0, NUM_HEADS), **part: Any
    ) -> None:
        """`part` is what a pull of several ranks differs in."""
        self._ended = threading.Event()
        self.pull = HandoffPull(
            handoff, heads, connector=connector, transfers=side.ownership, kv=side.kv, on_end=lambda _: self._ended.set(),
            deadline_s=DEADLINE_S, **part,
        )  # fmt: skip

    def outcome(self) -> PullOutcome:
        assert self._ended.wait(DEADLINE_S)
        assert self.pull.outcome is not None
        return self.pull.outcome


def reserve(side: Side, pulling: Pulling, num_blocks: int, first: int = 0) -> tuple[TransferRef, list[int]]:
    block_ids = side.pool.try_allocate(num_blocks)
    assert block_ids is not None
    ref = side.ownership.open(Direction.IN, block_ids)
    pulling.pull.reserve(ref, block_ids, first)
    return ref, block_ids


def assert_equal(giver: Side, giver_ids: list[int], taker: Side, taker_ids: list[int]) -> None:
    for layer in (0, 1):
        for ours, theirs in zip(giver.kv.canonical(layer), taker.kv.canonical(layer), strict=True):
            assert torch.equal(ours[giver_ids], theirs[taker_ids])
