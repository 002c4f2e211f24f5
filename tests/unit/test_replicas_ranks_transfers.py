"""What the ranks of a replica say to each other about KV that is handed over: no block is freed that a rank may still touch."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.block_pool import BlockPool
from kvcache.handoff import HandoffFailed, HeadShare
from kvcache.ownership import Direction, KVOwnership, TransferRef
from kvcache.spec import CANONICAL_LAYOUT
from kvcache.transfer.process_group import ProcessGroupTransport
from kvcache.transfer.pull import PullOutcome
from kvcache.transfer.remote import RemoteConnector
from kvcache.transfer_gate import TransferGate
from kvcache.wire import WireFormat
from replicas.ranks.follower_transfers import FollowerTransfers
from replicas.ranks.rank_transfers import RankTransfers
from replicas.ranks.ranks import RankLost
from replicas.ranks.transfer_message import (
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
from tests.transfer_sides import CPU, DEADLINE_S, Side, make_handoff

REF = TransferRef(3, 1 << 62)
SHARE = HeadShare(first=2, end=4, address="tcp://10.0.0.1:1")
HANDOFF = make_handoff(REF, 8, SHARE, replace(SHARE, first=0, end=2))


class Line:
    """Stands for `Ranks`: orders wait until a test lets a rank have them, and answers until it lets rank 0."""

    def __init__(self, num_others: int) -> None:
        self.size = num_others + 1
        self.lost: str | None = None
        self.orders: dict[int, deque[bytes]] = {rank: deque() for rank in range(1, self.size)}
        self.answer: Callable[[int, bytes], None] = lambda rank, payload: None

    @property
    def is_lost(self) -> bool:
        return self.lost is not None

    def check(self) -> None:
        if self.lost is not None:
            raise RankLost(self.lost)

    def when_answered(self, call: Callable[[int, bytes], None]) -> None:
        self.answer = call

    def send_order(self, payload: bytes) -> None:
        self.check()
        for orders in self.orders.values():
            orders.append(payload)


@pytest.mark.parametrize(
    "message",
    [
        Offer(REF, (1, 2, 3), 40), Computed(REF, 16), Completed(REF, (5,)), Completed(REF, ()), StartPull(9, HANDOFF), CancelPull(9, "why"),
        Reserve(9, REF, (), 2), Close(REF), Serves(SHARE), Closed(REF), Pulled(9, PullOutcome(output_ids=(1,), transfer_s=0.5)),
    ],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_message_comes_out_as_it_went_in(message: Any) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("payload", [b"", b"[]", b'["Offer",{}]', b'["Dance",{"ref":[1,2]}]', b'["Close",{"ref":5}]', b'["Close",[]]'])
def test_message_of_another_version_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match="is not of this version"):
        decode(payload)


def test_other_ranks_learn_nothing_of_the_sources_block_ids() -> None:
    assert StartPull.of(1, replace(HANDOFF, block_ids=(1, 2))).handoff == HANDOFF


class PlayedRank:
    """A rank that opens and closes as it is told, and reads or writes when the test says so."""

    def __init__(self) -> None:
        self.answers: deque[bytes] = deque()
        self.gate = TransferGate(30.0, lambda ref: self.answers.append(encode(Closed(ref))))
        self.blocks: dict[TransferRef, tuple[int, ...]] = {}  # transfer -> what it may touch
        self.busy: list[TransferRef] = []

    def obey(self, payload: bytes) -> None:
        match decode(payload):
            case Offer(ref, block_ids, _) | Reserve(_, ref, block_ids, _):
                self.blocks[ref] = block_ids
                self.gate.open(ref)
            case Close(ref):
                self.gate.close(ref)

    def touches(self) -> Iterator[int]:
        """Blocks that it reads or writes, or may begin to."""
        for ref, block_ids in self.blocks.items():
            if ref in self.busy or self.gate.renew(ref):
                yield from block_ids


NUM_BLOCKS, NUM_OTHERS, LEASE_S = 4, 2, 10.0
EVENTS = ("offer", "load", "close", "expire", "obey", "answer", "begin", "end", "collect", "deliver")


class Replica:
    """Rank 0's books and two more ranks, with everything between them in the hands of the test."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.line = Line(NUM_OTHERS)
        self.transfers = RankTransfers(self.line)  # type: ignore[arg-type]
        self.pool = BlockPool(NUM_BLOCKS, 1)
        self.ownership = KVOwnership(
            pool=self.pool, epoch=1, lease_s=LEASE_S, clock=lambda: self.now_s, try_close_elsewhere=self.transfers.try_close
        )
        self.ranks = {rank: PlayedRank() for rank in range(1, NUM_OTHERS + 1)}
        self.refs: list[TransferRef] = []

    def happen(self, event: str, which: int) -> None:
        number = 1 + which % NUM_OTHERS
        rank = self.ranks[number]
        ref = self.refs[which % len(self.refs)] if self.refs else None
        if event in ("offer", "load") and (block_ids := self.pool.try_allocate(1 + which % 2)) is not None:
            self.open(Direction.OUT if event == "offer" else Direction.IN, block_ids)
        elif event == "close" and ref is not None:
            self.ownership.close(ref)
        elif event == "expire":
            self.now_s += LEASE_S
        elif event == "obey" and self.line.orders[number]:
            rank.obey(self.line.orders[number].popleft())
        elif event == "answer" and rank.answers:
            self.line.answer(number, rank.answers.popleft())
        elif event == "begin" and ref is not None and rank.gate.begin(ref):
            rank.busy.append(ref)
        elif event == "end" and rank.busy:
            rank.gate.end(rank.busy.pop(which % len(rank.busy)))
        elif event == "collect":
            self.ownership.collect()
        elif event == "deliver":
            for one in range(2 * NUM_BLOCKS * NUM_OTHERS):
                self.happen("obey", one)
                self.happen("answer", one)

    def open(self, direction: Direction, block_ids: list[int]) -> None:
        """Their request ends at once: from now on only the transfer holds the blocks."""
        ref = self.ownership.open(direction, block_ids)
        self.refs.append(ref)
        if direction is Direction.OUT:
            self.transfers.offer(ref, block_ids, len(block_ids))
        else:
            self.transfers.reserve(0, ref, block_ids, 0)
        self.pool.release(block_ids)

    def check(self) -> None:
        self.ownership.check()
        self.pool.check_holders(self.ownership.tables())
        for rank in self.ranks.values():
            for block_id in rank.touches():
                assert self.pool.ref_count(block_id) > 0, f"block {block_id} is free, and a rank may touch it"


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), min_size=30, max_size=60))
def test_no_block_is_free_while_a_rank_may_touch_it_and_all_are_in_the_end(events: list[tuple[str, int]]) -> None:
    replica = Replica()
    for event, which in events:
        replica.happen(event, which)
        replica.check()
    while any(rank.busy for rank in replica.ranks.values()):
        for which in range(NUM_OTHERS):
            replica.happen("end", which)
    for event in ("expire", "collect", "deliver", "deliver", "collect"):  # the orders, and then what they are answered
        replica.happen(event, 0)
        replica.check()
    assert replica.pool.num_free == NUM_BLOCKS
    assert not replica.ownership.has_transfers


def test_blocks_come_back_when_the_last_rank_has_said_so_and_it_is_asked_once() -> None:
    replica = Replica()
    replica.happen("offer", 0)
    (ref,) = replica.refs
    changes: list[None] = []
    replica.transfers.when_changed(lambda: changes.append(None))
    replica.ownership.close(ref)
    assert replica.ownership.collect() == replica.ownership.collect() == []
    assert [decode(order) for order in replica.line.orders[1]][1:] == [Close(ref)]
    replica.line.answer(1, encode(Closed(ref)))
    assert replica.ownership.collect() == []
    assert not replica.ownership.has_let_go(ref)
    assert changes == []
    replica.line.answer(2, encode(Closed(ref)))
    assert len(changes) == 1
    assert replica.ownership.collect() == [ref]
    assert replica.ownership.has_let_go(ref)


def test_lost_rank_holds_no_block_and_is_told_of_by_check_alone() -> None:
    replica = Replica()
    replica.happen("offer", 0)
    replica.line.lost = "rank 2 has died"
    replica.transfers.note_computed(replica.refs[0], 1)
    replica.ownership.close(replica.refs[0])
    assert replica.ownership.collect() == replica.refs
    with pytest.raises(RankLost, match="rank 2 has died"):
        replica.transfers.check()


def test_ends_of_a_pull_reach_who_began_it_until_it_is_cancelled() -> None:
    line = Line(2)
    transfers = RankTransfers(line)  # type: ignore[arg-type]
    ends: list[PullOutcome] = []
    first, second = (transfers.start_pull(HANDOFF, ends.append) for _ in range(2))
    line.answer(1, encode(Pulled(first, PullOutcome(num_bytes=1))))
    line.answer(2, encode(Pulled(first, PullOutcome(error="no"))))
    transfers.cancel(second, "the client left")
    line.answer(1, encode(Pulled(second, PullOutcome(error="the client left"))))
    assert [(end.num_bytes, end.error) for end in ends] == [(1, None), (0, "no")]
    assert transfers._pulls == {}, "what has ended is forgotten"
    with pytest.raises(ValueError, match="a rank answers with"):
        line.answer(1, encode(Close(REF)))


def test_shares_stand_in_the_order_of_ranks() -> None:
    line = Line(2)
    transfers = RankTransfers(line)  # type: ignore[arg-type]
    line.answer(2, encode(Serves(SHARE)))
    line.answer(1, encode(Serves(replace(SHARE, first=1, end=2))))
    assert [share.first for share in transfers.shares] == [1, 2]


class Follower:
    """The real thing over its own memory; what it answers comes out of a queue."""

    def __init__(self, heads: range) -> None:
        self.side = Side(CANONICAL_LAYOUT, len(heads))
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.transfers = FollowerTransfers(
            self.side.kv, heads, [ProcessGroupTransport(CPU)], host="127.0.0.1", lease_s=1.0, deadline_s=5.0, send=self._answers.put
        )
        self.share = self.next_answer().share

    def obey(self, *orders: Any) -> None:
        for order in orders:
            self.transfers.obey(encode(order))

    def next_answer(self) -> Any:
        return decode(self._answers.get(timeout=DEADLINE_S))


@pytest.fixture
def followers() -> Iterator[tuple[Follower, Follower]]:
    """One that gives the second half of the heads, and one that takes the last of them."""
    pair = Follower(range(2, 4)), Follower(range(3, 4))
    yield pair
    for one in pair:
        one.transfers.close()


def test_rank_serves_what_is_computed_until_it_is_told_to_close(followers: tuple[Follower, Follower]) -> None:
    giver, taker = followers
    assert (giver.share.first, giver.share.end) == (2, 4)
    connector = RemoteConnector([ProcessGroupTransport(CPU)], taker.side.kv)
    session = connector.connect(giver.share.address)
    handoff = make_handoff(REF, 8, giver.share)
    form = WireFormat(layout=CANONICAL_LAYOUT, layers=(0, 2), heads=(0, 1))
    session.renew(handoff)
    assert session.read(handoff, form, 1, 0.0).num_blocks == 0, "rank 0's word of it may be on its way here"
    giver.obey(Offer(REF, (1, 2), 8))
    assert session.read(handoff, form, 0, 0.0).num_blocks == 0
    giver.obey(Computed(REF, 4))
    assert session.read(handoff, form, 0, 0.0).num_blocks == 1
    giver.obey(Close(REF))
    assert giver.next_answer() == Closed(REF)
    with pytest.raises(HandoffFailed, match="not open at the source"):
        session.read(handoff, form, 0, 0.0)
    session.close()


def test_reader_that_is_earlier_than_the_offer_gets_its_blocks(followers: tuple[Follower, Follower]) -> None:
    giver, taker = followers
    load = TransferRef(0, 5)
    taker.obey(StartPull(0, make_handoff(REF, 8, giver.share)), Reserve(0, load, (4, 3), 0))
    deadline_s = time.monotonic() + DEADLINE_S
    while not any(thread.name == "transfer-serve" for thread in threading.enumerate()) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    giver.obey(Offer(REF, (1, 2), 8), Computed(REF, 8), Completed(REF, (42,)))
    assert taker.next_answer() == Closed(load)
    assert taker.next_answer().outcome.error is None


def test_rank_brings_its_heads_and_closes_before_it_says_so(followers: tuple[Follower, Follower]) -> None:
    giver, taker = followers
    for tensor in giver.side.kv.canonical(0):
        tensor.copy_(torch.randn_like(tensor))
    load = TransferRef(0, 5)
    giver.obey(Offer(REF, (1, 2), 8), Computed(REF, 8), Completed(REF, (42,)))
    taker.obey(StartPull(0, make_handoff(REF, 8, giver.share)), Reserve(0, load, (4, 3), 0))
    assert taker.next_answer() == Closed(load)
    pulled = taker.next_answer()
    assert (pulled.pull, pulled.outcome.error, pulled.outcome.output_ids) == (0, None, (42,))
    for ours, theirs in zip(giver.side.kv.canonical(0), taker.side.kv.canonical(0), strict=True):
        assert torch.equal(ours[[1, 2]][:, 1:], theirs[[4, 3]])
    taker.obey(Close(load), CancelPull(0, "late"))


def test_rank_whose_pull_failed_before_its_blocks_came_gives_them_back(followers: tuple[Follower, Follower]) -> None:
    giver, taker = followers
    taker.obey(StartPull(0, make_handoff(REF, 8, replace(giver.share, first=0, end=1))))
    pulled = taker.next_answer()
    assert pulled.outcome.error == "no share of the handoff holds KV head 3"
    taker.obey(Reserve(0, TransferRef(0, 5), (4, 3), 0))
    assert taker.next_answer() == Closed(TransferRef(0, 5))


def test_rank_that_is_told_to_cancel_writes_nothing_afterwards(followers: tuple[Follower, Follower]) -> None:
    giver, taker = followers
    load = TransferRef(0, 5)
    giver.obey(Offer(REF, (1, 2), 8))
    taker.obey(StartPull(0, make_handoff(REF, 8, giver.share)), Reserve(0, load, (4, 3), 0), CancelPull(0, "gone"), Close(load))
    answers = [taker.next_answer() for _ in range(2)]
    assert Closed(load) in answers
    assert [one.outcome.error for one in answers if isinstance(one, Pulled)] == ["gone"]
    giver.obey(Computed(REF, 8), Completed(REF, (42,)))
    assert all(torch.isnan(tensor[[4, 3]]).all() for tensor in taker.side.kv.canonical(0))


def test_rank_is_told_nonsense_and_says_so(followers: tuple[Follower, Follower]) -> None:
    with pytest.raises(ValueError, match="rank 0 orders"):
        followers[0].obey(Closed(REF))
