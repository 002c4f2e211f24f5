"""Sources and pulls over every transport, with both sides in this process: chunk by chunk, refusals, silence and death."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from kvcache.block_pool import BlockPool
from kvcache.handoff import HandoffFailed, HeadShare, KVHandoff, plan_heads
from kvcache.ownership import Direction, KVOwnership, TransferRef
from kvcache.spec import CANONICAL_LAYOUT, KVGroupSpec, KVLayout
from kvcache.tensors import KVTensors
from kvcache.transfer.control import ControlChannel
from kvcache.transfer.in_process import InProcessConnector
from kvcache.transfer.link import Connector, LinkLost, Transport
from kvcache.transfer.object_store import ObjectStoreTransport
from kvcache.transfer.process_group import ProcessGroupTransport
from kvcache.transfer.pull import HandoffPull, PullOutcome
from kvcache.transfer.remote import RemoteConnector
from kvcache.transfer.server import TransferServer
from kvcache.transfer.source import KVSource
from kvcache.wire import WireFormat
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
        return self.source.offer(block_ids, num_tokens), block_ids


def _handoff(ref: TransferRef, num_tokens: int, *shares: HeadShare, lease_s: float = 30.0) -> KVHandoff:
    return KVHandoff(
        fingerprint="", layout_id="", block_size=BLOCK_SIZE, dtype="float32", num_tokens=num_tokens, tokens_digest="", layers=(0, 2),
        block_ids=(), epoch=ref.epoch, lease=ref.number, lease_s=lease_s, shares=shares,
    )  # fmt: skip


Serve = Callable[[Side], str]


@pytest.fixture(params=["in-process", "process-group", "object-store"])
def wire(request: pytest.FixtureRequest) -> Iterator[tuple[Serve, Callable[[Side], Connector]]]:
    """Serves a source, and makes a connector for a receiver."""
    with ExitStack() as stack:
        if request.param == "in-process":
            registry = InProcessConnector()
            yield lambda side: registry.serve(side.source), lambda side: registry
            return

        store = MemoryStore()

        def transport_of_a_side() -> Transport:
            return ProcessGroupTransport(CPU) if request.param == "process-group" else ObjectStoreTransport(store, CPU)

        def serve(side: Side) -> str:
            transport = transport_of_a_side()
            server = TransferServer(side.source, {transport.name: transport})
            stack.callback(server.close)
            return server.address

        def connector(side: Side) -> Connector:
            made = RemoteConnector(transport_of_a_side(), side.kv)
            stack.callback(made.close)
            return made

        yield serve, connector
    assert store.objects == {}, "the store still holds a message"


class Pulling:
    """A pull and what tells of its end."""

    def __init__(self, side: Side, handoff: KVHandoff, connector: Connector, *, heads: tuple[int, int] = (0, NUM_HEADS)) -> None:
        self._ended = threading.Event()
        self.pull = HandoffPull(
            handoff, plan_heads(handoff.shares, *heads), connector=connector, ownership=side.ownership, kv=side.kv,
            on_end=self._ended.set, deadline_s=DEADLINE_S,
        )  # fmt: skip

    def outcome(self) -> PullOutcome:
        assert self._ended.wait(DEADLINE_S)
        assert self.pull.outcome is not None
        return self.pull.outcome


def _reserve(side: Side, pulling: Pulling, num_blocks: int, first: int = 0) -> tuple[TransferRef, list[int]]:
    block_ids = side.pool.try_allocate(num_blocks)
    assert block_ids is not None
    ref = side.ownership.open(Direction.IN, block_ids)
    pulling.pull.reserve(ref, block_ids, first)
    return ref, block_ids


def _assert_equal(giver: Side, giver_ids: list[int], taker: Side, taker_ids: list[int]) -> None:
    for layer in (0, 1):
        for ours, theirs in zip(giver.kv.canonical(layer), taker.kv.canonical(layer), strict=True):
            assert torch.equal(ours[giver_ids], theirs[taker_ids])


@pytest.mark.parametrize("layouts", [("htd-htd", "htd-htd"), ("hdt-htd", "htd-htd")], ids=["same", "converted"])
def test_pull_goes_on_as_chunks_are_computed_and_ends_with_the_first_token(
    wire: tuple[Serve, Callable[[Side], Connector]], layouts: tuple[str, str]
) -> None:
    serve, connect = wire
    giver, taker = (Side(KVLayout(*layout.split("-"))) for layout in layouts)
    ref, given = giver.offer(18)
    pulling = Pulling(taker, _handoff(ref, 18, HeadShare(first=0, end=NUM_HEADS, address=serve(giver))), connect(taker))
    load, taken = _reserve(taker, pulling, 5)
    giver.source.note_computed(ref, 9)  # two whole blocks and one token
    until_s = time.monotonic() + DEADLINE_S
    while giver.source.counters.num_early_bytes == 0 and time.monotonic() < until_s:
        threading.Event().wait(0.001)
    giver.source.note_computed(ref, 18)
    giver.source.complete(ref, [42])
    outcome = pulling.outcome()
    assert (outcome.error, outcome.output_ids) == (None, (42,))
    bytes_per_block = 2 * 2 * NUM_HEADS * BLOCK_SIZE * 8 * 4
    assert outcome.num_bytes == 5 * bytes_per_block
    assert giver.source.counters.num_early_bytes == 2 * bytes_per_block
    _assert_equal(giver, given, taker, taken)
    taker.ownership.close(load)
    assert giver.ownership.collect() == [ref], "the receiver's last word let the lease go"


def test_pull_brings_only_the_blocks_that_are_lacking(wire: tuple[Serve, Callable[[Side], Connector]]) -> None:
    serve, connect = wire
    giver, taker = Side(CANONICAL_LAYOUT), Side(CANONICAL_LAYOUT)
    ref, given = giver.offer(16)
    giver.source.note_computed(ref, 16)
    giver.source.complete(ref, [1])
    pulling = Pulling(taker, _handoff(ref, 16, HeadShare(first=0, end=NUM_HEADS, address=serve(giver))), connect(taker))
    _, taken = _reserve(taker, pulling, 1, first=3)
    outcome = pulling.outcome()
    assert outcome.error is None
    assert outcome.num_bytes == 2 * 2 * NUM_HEADS * BLOCK_SIZE * 8 * 4
    _assert_equal(giver, given[3:], taker, taken)


def test_pull_from_two_ranks_puts_their_heads_together(wire: tuple[Serve, Callable[[Side], Connector]]) -> None:
    serve, connect = wire
    givers = [Side(CANONICAL_LAYOUT, NUM_HEADS // 2) for _ in range(2)]
    taker = Side(KVLayout("hdt", "htd"))
    offers = [giver.offer(8) for giver in givers]
    for giver, (ref, _) in zip(givers, offers, strict=True):
        giver.source.note_computed(ref, 8)
        giver.source.complete(ref, [9])
    shares = [HeadShare(first=2 * i, end=2 * i + 2, address=serve(giver)) for i, giver in enumerate(givers)]
    pulling = Pulling(taker, _handoff(offers[0][0], 8, *shares), connect(taker))
    _, taken = _reserve(taker, pulling, 2)
    assert pulling.outcome().error is None
    for rank, giver in enumerate(givers):
        for ours, theirs in zip(giver.kv.canonical(1), taker.kv.canonical(1), strict=True):
            assert torch.equal(ours[offers[rank][1]], theirs[taken][:, 2 * rank : 2 * rank + 2])
        assert giver.ownership.collect()


def test_pull_of_another_epoch_or_a_closed_lease_fails_by_name(wire: tuple[Serve, Callable[[Side], Connector]]) -> None:
    serve, connect = wire
    giver, taker = Side(CANONICAL_LAYOUT), Side(CANONICAL_LAYOUT)
    ref, _ = giver.offer(8)
    giver.source.note_computed(ref, 8)
    handoff = _handoff(ref, 8, HeadShare(first=0, end=NUM_HEADS, address=serve(giver)))
    connector = connect(taker)
    older = Pulling(taker, replace(handoff, epoch=0), connector)
    _reserve(taker, older, 2)
    assert "another life" in (older.outcome().error or "")
    giver.source.withdraw(ref)
    late = Pulling(taker, handoff, connector)
    _reserve(taker, late, 2)
    assert "not open at the source" in (late.outcome().error or "")


def test_withdrawn_lease_ends_a_pull_that_waits_for_it(wire: tuple[Serve, Callable[[Side], Connector]]) -> None:
    serve, connect = wire
    giver, taker = Side(CANONICAL_LAYOUT), Side(CANONICAL_LAYOUT)
    ref, _ = giver.offer(8)
    pulling = Pulling(taker, _handoff(ref, 8, HeadShare(first=0, end=NUM_HEADS, address=serve(giver))), connect(taker))
    _reserve(taker, pulling, 2)
    giver.source.withdraw(ref)
    assert "not open" in (pulling.outcome().error or "")


def test_cancelled_pull_ends_and_writes_nothing_afterwards(wire: tuple[Serve, Callable[[Side], Connector]]) -> None:
    serve, connect = wire
    giver, taker = Side(CANONICAL_LAYOUT), Side(CANONICAL_LAYOUT)
    ref, _ = giver.offer(8)
    pulling = Pulling(taker, _handoff(ref, 8, HeadShare(first=0, end=NUM_HEADS, address=serve(giver))), connect(taker))
    load, taken = _reserve(taker, pulling, 2)
    taker.ownership.close(load)
    pulling.pull.cancel("the client left")
    giver.source.note_computed(ref, 8)
    assert pulling.outcome().error == "the client left"
    taker.ownership.collect()
    assert all(torch.isnan(tensor[taken]).all() for tensor in taker.kv.canonical(0))


def test_pull_that_waits_for_its_blocks_keeps_the_lease_alive(wire: tuple[Serve, Callable[[Side], Connector]]) -> None:
    serve, connect = wire
    giver, taker = Side(CANONICAL_LAYOUT, lease_s=0.3), Side(CANONICAL_LAYOUT)
    ref, given = giver.offer(8)
    giver.source.note_computed(ref, 8)
    giver.source.complete(ref, [3])
    handoff = _handoff(ref, 8, HeadShare(first=0, end=NUM_HEADS, address=serve(giver)), lease_s=0.3)
    pulling = Pulling(taker, handoff, connect(taker))
    before = giver.ownership.counters.num_renewed
    until_s = time.monotonic() + DEADLINE_S
    while giver.ownership.counters.num_renewed < before + 5 and time.monotonic() < until_s:
        threading.Event().wait(0.01)
    assert giver.ownership.collect() == []
    _, taken = _reserve(taker, pulling, 2)
    assert pulling.outcome().error is None
    _assert_equal(giver, given, taker, taken)


def test_pull_from_nobody_fails_by_name(wire: tuple[Serve, Callable[[Side], Connector]]) -> None:
    _, connect = wire
    taker = Side(CANONICAL_LAYOUT)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    pulling = Pulling(taker, _handoff(TransferRef(0, 1), 8, HeadShare(first=0, end=4, address=f"tcp://127.0.0.1:{port}")), connect(taker))
    assert "answers" in (pulling.outcome().error or "")


def test_silent_server_is_given_up_at_the_deadline() -> None:
    side = Side(CANONICAL_LAYOUT)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # takes the connection and never says a word
        connector = RemoteConnector(ProcessGroupTransport(CPU), side.kv, deadline_s=0.2)
        start_s = time.monotonic()
        with pytest.raises(LinkLost, match="makes no link"):
            connector.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        assert time.monotonic() - start_s < 5


def test_server_answers_nonsense_with_the_reason_and_goes_on() -> None:
    side = Side(CANONICAL_LAYOUT)
    transport = ProcessGroupTransport(CPU)
    server = TransferServer(side.source, {transport.name: transport})
    host, port = "127.0.0.1", int(server.address.rsplit(":", 1)[1])
    with ControlChannel.connect(host, port, 5.0) as channel:
        channel.send({"transport": "pigeons"}, 5.0)
        assert "pigeons" in channel.receive(5.0)["error"]
    with ControlChannel.connect(host, port, 5.0) as channel:
        channel.send({"transport": transport.name}, 5.0)
        link = ProcessGroupTransport(CPU).join(channel.receive(5.0)["invitation"])
        for message in ({}, {"lease": 0, "epoch": 1, "do": "dance"}, {"lease": "x", "epoch": 1, "do": "renew"}):
            channel.send(message, 5.0)
            assert "makes no sense" in channel.receive(5.0)["error"]
        channel.send({"lease": 0, "epoch": 1, "do": "renew"}, 5.0)
        assert "not open" in channel.receive(5.0)["error"]
        link.close()
    server.close()


def test_control_channel_with_too_long_a_message_is_lost() -> None:
    one, other = socket.socketpair()
    ours = ControlChannel.__new__(ControlChannel)
    ours._sock = one
    other.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(LinkLost, match="more than"):
        ours.receive(1.0)
    ours.close()
    other.close()


def test_link_is_kept_for_the_next_handoff() -> None:
    giver, taker = Side(CANONICAL_LAYOUT), Side(CANONICAL_LAYOUT)
    transport = ProcessGroupTransport(CPU)
    server = TransferServer(giver.source, {transport.name: transport})
    connector = RemoteConnector(ProcessGroupTransport(CPU), taker.kv)
    first = connector.connect(server.address)
    first.close(is_reusable=True)
    assert connector.connect(server.address) is first
    first.close(is_reusable=True)
    server.close()
    with pytest.raises(LinkLost, match="no transfer server"):
        connector.connect(server.address)
    connector.close()


def test_reading_past_the_table_or_another_format_is_refused() -> None:
    side = Side(CANONICAL_LAYOUT)
    ref, _ = side.offer(8)
    form = WireFormat(layout=CANONICAL_LAYOUT, layers=(0, 2), heads=None)
    with pytest.raises(HandoffFailed, match="block 3"):
        side.source.read(ref, form, 3, 0.0)
    with pytest.raises(HandoffFailed, match="layers"):
        side.source.read(ref, replace(form, layers=(0, 3)), 0, 0.0)
    assert side.source.read(ref, form, 0, 0.0).num_blocks == 0


def test_peer_that_never_joins_its_group_holds_up_no_other() -> None:
    side = Side(CANONICAL_LAYOUT)
    transport = ProcessGroupTransport(CPU, deadline_s=2.0)
    server = TransferServer(side.source, {transport.name: transport})
    connector = RemoteConnector(ProcessGroupTransport(CPU), side.kv)
    with ControlChannel.connect("127.0.0.1", int(server.address.rsplit(":", 1)[1]), 5.0) as dead:
        dead.send({"transport": transport.name}, 5.0)
        assert dead.receive(5.0)["ok"]  # invited, and never heard of again
        start_s = time.monotonic()
        connector.connect(server.address).close()
        assert time.monotonic() - start_s < 1.5
    server.close()
