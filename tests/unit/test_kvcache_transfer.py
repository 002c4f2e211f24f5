"""Sources and pulls over every transport, with both sides in this process: chunk by chunk, refusals, silence and death."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from kvcache.handoff import HandoffFailed, HeadShare
from kvcache.ownership import TransferRef
from kvcache.spec import CANONICAL_LAYOUT, KVLayout
from kvcache.transfer.link import Connector
from kvcache.wire import WireFormat
from tests.transfer_sides import BLOCK_SIZE, DEADLINE_S, NUM_HEADS, Pulling, Serve, Side, assert_equal, make_handoff, reserve, wired

Wire = tuple[Serve, Callable[[Side], Connector]]


@pytest.fixture(params=["in-process", "process-group", "object-store"])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    with wired(request.param) as wire:
        yield wire


@pytest.mark.parametrize("layouts", [("htd-htd", "htd-htd"), ("hdt-htd", "htd-htd")], ids=["same", "converted"])
def test_pull_goes_on_as_chunks_are_computed_and_ends_with_the_first_token(wire: Wire, layouts: tuple[str, str]) -> None:
    serve, connect = wire
    giver, taker = (Side(KVLayout(*layout.split("-"))) for layout in layouts)
    ref, given = giver.offer(18)
    pulling = Pulling(taker, make_handoff(ref, 18, HeadShare(first=0, end=NUM_HEADS, address=serve(giver))), connect(taker))
    load, taken = reserve(taker, pulling, 5)
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
    assert_equal(giver, given, taker, taken)
    taker.ownership.close(load)
    assert giver.ownership.collect() == [ref], "the receiver's last word let the lease go"


def test_pull_brings_only_the_blocks_that_are_lacking(wire: Wire) -> None:
    serve, connect = wire
    giver, taker = Side(CANONICAL_LAYOUT), Side(CANONICAL_LAYOUT)
    ref, given = giver.offer(16)
    giver.source.note_computed(ref, 16)
    giver.source.complete(ref, [1])
    pulling = Pulling(taker, make_handoff(ref, 16, HeadShare(first=0, end=NUM_HEADS, address=serve(giver))), connect(taker))
    _, taken = reserve(taker, pulling, 1, first=3)
    outcome = pulling.outcome()
    assert outcome.error is None
    assert outcome.num_bytes == 2 * 2 * NUM_HEADS * BLOCK_SIZE * 8 * 4
    assert_equal(giver, given[3:], taker, taken)


def test_pull_of_another_epoch_or_a_closed_lease_fails_by_name(wire: Wire) -> None:
    serve, connect = wire
    giver, taker = Side(CANONICAL_LAYOUT), Side(CANONICAL_LAYOUT)
    ref, _ = giver.offer(8)
    giver.source.note_computed(ref, 8)
    handoff = make_handoff(ref, 8, HeadShare(first=0, end=NUM_HEADS, address=serve(giver)))
    connector = connect(taker)
    older = Pulling(taker, replace(handoff, epoch=0), connector)
    reserve(taker, older, 2)
    assert "another life" in (older.outcome().error or "")
    giver.source.withdraw(ref)
    late = Pulling(taker, handoff, connector)
    reserve(taker, late, 2)
    assert "not open at the source" in (late.outcome().error or "")


def test_withdrawn_lease_ends_a_pull_that_waits_for_it(wire: Wire) -> None:
    serve, connect = wire
    giver, taker = Side(CANONICAL_LAYOUT), Side(CANONICAL_LAYOUT)
    ref, _ = giver.offer(8)
    pulling = Pulling(taker, make_handoff(ref, 8, HeadShare(first=0, end=NUM_HEADS, address=serve(giver))), connect(taker))
    reserve(taker, pulling, 2)
    giver.source.withdraw(ref)
    assert "not open" in (pulling.outcome().error or "")


def test_cancelled_pull_ends_and_writes_nothing_afterwards(wire: Wire) -> None:
    serve, connect = wire
    giver, taker = Side(CANONICAL_LAYOUT), Side(CANONICAL_LAYOUT)
    ref, _ = giver.offer(8)
    pulling = Pulling(taker, make_handoff(ref, 8, HeadShare(first=0, end=NUM_HEADS, address=serve(giver))), connect(taker))
    load, taken = reserve(taker, pulling, 2)
    taker.ownership.close(load)
    pulling.pull.cancel("the client left")
    giver.source.note_computed(ref, 8)
    assert pulling.outcome().error == "the client left"
    taker.ownership.collect()
    assert all(torch.isnan(tensor[taken]).all() for tensor in taker.kv.canonical(0))


def test_pull_that_waits_for_its_blocks_keeps_the_lease_alive(wire: Wire) -> None:
    serve, connect = wire
    giver, taker = Side(CANONICAL_LAYOUT, lease_s=10.0), Side(CANONICAL_LAYOUT)  # a slow machine needs a while to connect
    ref, given = giver.offer(8)
    giver.source.note_computed(ref, 8)
    giver.source.complete(ref, [3])
    handoff = make_handoff(ref, 8, HeadShare(first=0, end=NUM_HEADS, address=serve(giver)), lease_s=0.3)
    pulling = Pulling(taker, handoff, connect(taker))
    before = giver.ownership.counters.num_renewed
    until_s = time.monotonic() + DEADLINE_S
    while giver.ownership.counters.num_renewed < before + 5 and time.monotonic() < until_s:
        threading.Event().wait(0.01)
    assert giver.ownership.counters.num_renewed >= before + 5
    assert giver.ownership.collect() == []
    _, taken = reserve(taker, pulling, 2)
    assert pulling.outcome().error is None
    assert_equal(giver, given, taker, taken)


def test_pull_from_nobody_fails_by_name(wire: Wire) -> None:
    _, connect = wire
    taker = Side(CANONICAL_LAYOUT)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    pulling = Pulling(
        taker, make_handoff(TransferRef(0, 1), 8, HeadShare(first=0, end=4, address=f"tcp://127.0.0.1:{port}")), connect(taker)
    )
    assert "answers" in (pulling.outcome().error or "")


def test_reading_past_the_table_or_another_format_is_refused() -> None:
    side = Side(CANONICAL_LAYOUT)
    ref, _ = side.offer(8)
    form = WireFormat(layout=CANONICAL_LAYOUT, layers=(0, 2), heads=None)
    with pytest.raises(HandoffFailed, match="block 3"):
        side.source.read(ref, form, 3, 0.0)
    with pytest.raises(HandoffFailed, match="layers"):
        side.source.read(ref, replace(form, layers=(0, 3)), 0, 0.0)
    assert side.source.read(ref, form, 0, 0.0).num_blocks == 0
