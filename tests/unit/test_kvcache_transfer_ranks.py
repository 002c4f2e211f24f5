"""Pulls from and to replicas of several ranks, each with its own heads."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from kvcache.handoff import HeadShare, KVHandoff
from kvcache.ownership import TransferRef
from kvcache.spec import CANONICAL_LAYOUT, KVGroupSpec, KVLayout
from kvcache.tensors import KVTensors
from kvcache.transfer.link import Connector
from kvcache.transfer.pull import PullOutcome
from kvcache.transfer_gate import TransferGate
from tests.transfer_sides import (
    BLOCK_SIZE,
    CPU,
    DEADLINE_S,
    NUM_BLOCKS,
    NUM_HEADS,
    Pulling,
    Serve,
    Side,
    assert_equal,
    make_handoff,
    reserve,
    wired,
)

Wire = tuple[Serve, Callable[[Side], Connector]]


@pytest.fixture(params=["in-process", "process-group", "object-store"])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    with wired(request.param) as wire:
        yield wire


def _two_rank_offer(serve: Serve) -> tuple[list[Side], TransferRef, list[int], KVHandoff]:
    """Two ranks with half of the heads each, of which the second one has its transfer from rank 0."""
    givers = [Side(CANONICAL_LAYOUT, NUM_HEADS // 2) for _ in range(2)]
    ref, given = givers[0].offer(8)
    gate = givers[1].source.transfers = TransferGate(30.0, lambda ref: None)
    gate.open(ref, givers[1].source.wake)
    givers[1].source.offer(ref, given, 8)
    for layer in (0, 1):
        for tensor in givers[1].kv.canonical(layer):
            tensor.copy_(torch.randn_like(tensor))
    shares = [HeadShare(first=2 * i, end=2 * i + 2, address=serve(giver)) for i, giver in enumerate(givers)]
    return givers, ref, given, make_handoff(ref, 8, *shares)


def _note_all(givers: list[Side], ref: TransferRef) -> None:
    for giver in givers:
        giver.source.note_computed(ref, 8)
        giver.source.complete(ref, [9])


def test_pull_from_two_ranks_puts_their_heads_together(wire: Wire) -> None:
    serve, connect = wire
    givers, ref, given, handoff = _two_rank_offer(serve)
    taker = Side(KVLayout("hdt", "htd"))
    pulling = Pulling(taker, handoff, connect(taker))
    _, taken = reserve(taker, pulling, 2)
    _note_all(givers, ref)
    assert pulling.outcome().error is None
    for rank, giver in enumerate(givers):
        for ours, theirs in zip(giver.kv.canonical(1), taker.kv.canonical(1), strict=True):
            assert torch.equal(ours[given], theirs[taken][:, 2 * rank : 2 * rank + 2])
    assert givers[0].ownership.collect() == [ref], "rank 0 of the source has the receiver's last word"
    assert givers[1].source.transfers.renew(ref), "the other one has its own rank 0's"


def test_pull_whose_heads_lie_elsewhere_keeps_the_lease_of_rank_0(wire: Wire) -> None:
    serve, connect = wire
    givers, ref, _, handoff = _two_rank_offer(serve)
    givers[0].source.note_computed(ref, 8)
    givers[0].source.complete(ref, [9])
    taker = Side(CANONICAL_LAYOUT)
    pulling = Pulling(taker, replace(handoff, lease_s=0.03), connect(taker))
    reserve(taker, pulling, 2)
    until_s = time.monotonic() + DEADLINE_S
    while givers[0].source.counters.num_bytes == 0 and time.monotonic() < until_s:
        threading.Event().wait(0.001)
    before = givers[0].ownership.counters.num_renewed
    while givers[0].ownership.counters.num_renewed < before + 5 and time.monotonic() < until_s:
        threading.Event().wait(0.001)
    _note_all(givers[1:], ref)
    assert pulling.outcome().error is None
    assert givers[0].ownership.counters.num_renewed >= before + 5


def _whole_offer(serve: Serve) -> tuple[Side, TransferRef, list[int], KVHandoff]:
    giver = Side(CANONICAL_LAYOUT)
    ref, given = giver.offer(8)
    _note_all([giver], ref)
    return giver, ref, given, make_handoff(ref, 8, HeadShare(first=0, end=NUM_HEADS, address=serve(giver)), lease_s=0.3)


def test_pull_of_rank_0_says_done_when_those_of_the_others_are_whole(wire: Wire) -> None:
    serve, connect = wire
    giver, ref, given, handoff = _whole_offer(serve)
    takers = [Side(CANONICAL_LAYOUT, NUM_HEADS // 2) for _ in range(2)]
    lead = Pulling(takers[0], handoff, connect(takers[0]), heads=(0, 2), num_others=1)
    _, led = reserve(takers[0], lead, 2)
    other = Pulling(takers[1], handoff, connect(takers[1]), heads=(2, 4), is_lead=False)
    _, taken = reserve(takers[1], other, 2)
    outcome = other.outcome()
    assert outcome.error is None
    renewed = giver.ownership.counters.num_renewed
    until_s = time.monotonic() + DEADLINE_S
    while giver.ownership.counters.num_renewed < renewed + 3 and time.monotonic() < until_s:
        threading.Event().wait(0.01)
    assert giver.ownership.counters.num_renewed >= renewed + 3
    assert giver.ownership.is_open(ref), "rank 0 keeps the lease alive until it hears of the other"
    lead.pull.note_other(outcome)
    assert lead.outcome().error is None
    assert lead.outcome().num_bytes == 2 * outcome.num_bytes
    assert giver.ownership.collect() == [ref]
    for rank, block_ids in enumerate((led, taken)):
        for ours, theirs in zip(giver.kv.canonical(0), takers[rank].kv.canonical(0), strict=True):
            assert torch.equal(ours[given][:, 2 * rank : 2 * rank + 2], theirs[block_ids])


def test_pull_of_rank_0_fails_with_that_of_another_and_leaves_the_lease(wire: Wire) -> None:
    serve, connect = wire
    giver, ref, _, handoff = _whole_offer(serve)
    taker = Side(CANONICAL_LAYOUT, NUM_HEADS // 2)
    lead = Pulling(taker, handoff, connect(taker), heads=(0, 2), num_others=2)
    reserve(taker, lead, 2)
    lead.pull.note_other(PullOutcome())
    lead.pull.note_other(PullOutcome(error="no way to it"))
    assert lead.outcome().error == "on another rank: no way to it"
    assert giver.ownership.is_open(ref)


def test_pull_for_a_head_that_is_nowhere_fails_by_name(wire: Wire) -> None:
    serve, connect = wire
    _, _, _, handoff = _whole_offer(serve)
    taker = Side(CANONICAL_LAYOUT)
    pulling = Pulling(taker, handoff, connect(taker), heads=(3, 5))
    assert pulling.outcome().error == "no share of the handoff holds KV head 4"


def test_layers_that_differ_in_heads_are_brought_whole(wire: Wire) -> None:
    serve, connect = wire
    giver, taker = Side(CANONICAL_LAYOUT), Side(CANONICAL_LAYOUT)
    groups = [KVGroupSpec(layers=(i,), kind="full", window=None, num_kv_heads=2 + 2 * i, k_dim=8, v_dim=8) for i in (0, 1)]
    for side in (giver, taker):
        side.kv = KVTensors(groups, layout=CANONICAL_LAYOUT, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU)
        side.source.kv = side.kv
    ref, given = giver.offer(8)
    _note_all([giver], ref)
    pulling = Pulling(taker, make_handoff(ref, 8, HeadShare(first=0, end=2, address=serve(giver))), connect(taker), heads=None)
    _, taken = reserve(taker, pulling, 2)
    assert pulling.outcome().error is None
    assert_equal(giver, given, taker, taken)
