"""Every order of events of two requests, two replicas and three blocks, over the real pool and the real ownership.

The model around them is a source that prefills, a receiver that loads, and a network that loses, repeats and delays
messages. An abort, a death or an expiry can happen at any point. Each request needs two of the three blocks, so that every
freed block is needed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from kvcache.block_pool import BlockPool
from kvcache.ownership import BlockState, Direction, KVOwnership, TransferRef, _Transfer

NUM_BLOCKS, NUM_NEEDED = 3, 2
NUM_FAULTS = 2
"""Losses, repetitions, aborts and deaths in one run, together. Expiry is free: it may come at any point."""


class Violation(AssertionError):
    """The exploration found what must not be."""


_fields = attrgetter(*_Transfer.__slots__)


def _clock() -> float:
    return 0.0


class Replica:
    """A pool, its ownership, what its blocks really hold, and who reads or writes them now."""

    def __init__(self, kind: type[KVOwnership], epoch: int) -> None:
        self.cached_key: object = None  # of a replica that is settled
        self.pool = BlockPool(NUM_BLOCKS, 1)
        self.ownership = kind(pool=self.pool, epoch=epoch, lease_s=1.0, clock=_clock)
        self.content: list[str | None] = [None] * NUM_BLOCKS  # None is poison
        self.tables: dict[str, tuple[int, ...]] = {}  # request -> blocks that it holds
        self.busy: dict[str, tuple[TransferRef, tuple[int, ...]]] = {}  # request -> transfer and blocks under a read or write

    def clone(self) -> Replica:
        new = Replica.__new__(Replica)
        new.cached_key = None
        new.pool = BlockPool(NUM_BLOCKS, 1)
        for block, old_block in zip(new.pool._blocks, self.pool._blocks, strict=True):
            block.ref_count = old_block.ref_count
        new.pool._blank = list(self.pool._blank)
        old = self.ownership
        new.ownership = type(old)(pool=new.pool, epoch=old.epoch, lease_s=1.0, clock=_clock)
        new.ownership._transfers = {n: _Transfer(*_fields(t)) for n, t in old._transfers.items()}
        new.ownership._leased, new.ownership._loading = old._leased.copy(), set(old._loading)
        new.ownership._next_number = old._next_number
        new.content, new.tables, new.busy = list(self.content), dict(self.tables), dict(self.busy)
        return new

    def try_hold(self, request: str) -> bool:
        block_ids = self.pool.try_allocate(NUM_NEEDED)
        if block_ids is None:
            return False
        self.tables[request] = tuple(block_ids)
        return True

    def let_go(self, request: str) -> None:
        self.pool.release(self.tables.pop(request))

    def fill(self, request: str) -> None:
        for block_id in self.tables[request]:
            self.content[block_id] = request

    def settle(self) -> None:
        """Free blocks are poisoned, and taken in the order of their ids, so that equal states look equal."""
        self.pool._blank.sort(reverse=True)
        for block_id in self.pool._blank:
            self.content[block_id] = None

    def check(self) -> None:
        self.pool.check()
        self.pool.check_holders([*self.tables.values(), *self.ownership.tables()])
        self.ownership.check()
        for request, (_, block_ids) in self.busy.items():
            for block_id in block_ids:
                if self.pool.ref_count(block_id) == 0:
                    raise Violation(f"block {block_id} is free while it is read or written for {request}")

    def key(self) -> object:
        if self.cached_key is None:
            self.cached_key = self._key()
        return self.cached_key

    def _key(self) -> object:
        transfers = self.ownership._transfers
        return (
            tuple(block.ref_count for block in self.pool._blocks),
            tuple(self.content),
            self.ownership.epoch,
            self.ownership._next_number,
            tuple((n, t.direction, t.block_ids, t.deadline_s, t.num_busy, t.is_closing) for n, t in sorted(transfers.items())),
            tuple(sorted(self.tables.items())),
            tuple(sorted(self.busy.items())),
        )


class Message(NamedTuple):
    kind: str  # offer, read, data, done
    request: str
    lease: TransferRef
    load: TransferRef = TransferRef(-1, -1)


@dataclass
class World:
    source: Replica
    target: Replica
    at_source: dict[str, str]  # waiting, prefilling, ended
    at_target: dict[str, str]  # waiting, loading, running, ended
    leases: dict[str, TransferRef] = field(default_factory=dict)
    loads: dict[str, TransferRef] = field(default_factory=dict)
    messages: frozenset[Message] = frozenset()
    num_faults_left: int = NUM_FAULTS

    def clone(self, touched: str) -> World:
        """A copy of its own, but for a replica that is not `touched`: that one is shared."""
        return World(
            self.source.clone() if "source" in touched else self.source,
            self.target.clone() if "target" in touched else self.target,
            dict(self.at_source),
            dict(self.at_target),
            dict(self.leases),
            dict(self.loads),
            self.messages,
            self.num_faults_left,
        )

    def key(self) -> object:
        return (
            self.source.key(),
            self.target.key(),
            tuple(self.at_source.items()),
            tuple(self.at_target.items()),
            tuple(sorted(self.leases.items())),
            tuple(sorted(self.loads.items())),
            self.messages,
            self.num_faults_left,
        )

    def send(self, message: Message) -> None:
        self.messages |= {message}

    # What the source does.

    def prefill(self, q: str) -> None:
        if self.source.try_hold(q):
            self.source.fill(q)
            self.leases[q] = self.source.ownership.open(Direction.OUT, self.source.tables[q])
            self.at_source[q] = "prefilling"
            self.send(Message("offer", q, self.leases[q]))

    def end_prefill(self, q: str) -> None:
        self.source.let_go(q)
        self.at_source[q] = "ended"

    def abort_prefill(self, q: str) -> None:
        self.source.ownership.close(self.leases[q])
        self.end_prefill(q)

    def end_read(self, q: str) -> None:
        ref, block_ids = self.source.busy.pop(q)
        if any(self.source.content[block_id] != q for block_id in block_ids):
            raise Violation(f"{q} was read from blocks that hold something else")
        self.source.ownership.end(ref)
        load = self.loads.get(q)
        if load is not None:
            self.send(Message("data", q, ref, load))

    # What the receiver does.

    def compute(self, q: str) -> None:
        if self.target.try_hold(q):
            self.target.fill(q)
            self.at_target[q] = "running"

    def give_up(self, q: str) -> None:
        self.target.ownership.close(self.loads[q])
        self.target.fill(q)
        self.at_target[q] = "running"

    def abort_decode(self, q: str) -> None:
        if self.at_target[q] == "loading":
            self.target.ownership.close(self.loads[q])
        if self.at_target[q] != "waiting":
            self.target.let_go(q)
        self.at_target[q] = "ended"

    def end_write(self, q: str) -> None:
        ref, block_ids = self.target.busy.pop(q)
        for block_id in block_ids:
            if any(block_id in table for other, table in self.target.tables.items() if other != q):
                raise Violation(f"{q} was written over a block that another request holds")
            if self.target.ownership.state(block_id) is not BlockState.LOADING:
                raise Violation(f"{q} was written to a block that is not loading")
            self.target.content[block_id] = q
        self.target.ownership.end(ref)
        if self.at_target[q] == "loading" and self.loads[q] == ref:
            self.target.ownership.close(ref)
            self.at_target[q] = "running"
            self.send(Message("done", q, self.leases[q]))

    def end_decode(self, q: str) -> None:
        if any(self.target.content[block_id] != q for block_id in self.target.tables[q]):
            raise Violation(f"{q} decoded from blocks that hold something else")
        self.target.let_go(q)
        self.at_target[q] = "ended"

    # What the network and fate do.

    def deliver(self, message: Message) -> bool:
        """False when nobody can take it yet."""
        q, source, target = message.request, self.source, self.target
        if message.kind == "offer":
            if self.at_target[q] == "waiting":
                if not target.try_hold(q):
                    return False
                self.loads[q] = target.ownership.open(Direction.IN, target.tables[q])
                self.at_target[q] = "loading"
                self.send(Message("read", q, message.lease))
        elif message.kind == "read":
            if q in source.busy:
                return False
            if source.ownership.begin(message.lease):
                source.busy[q] = (message.lease, source.ownership._transfers[message.lease.number].block_ids)
        elif message.kind == "data":
            if q in target.busy:
                return False
            if target.ownership.begin(message.load):
                target.busy[q] = (message.load, target.ownership._transfers[message.load.number].block_ids)
        else:
            source.ownership.close(message.lease)
        return True

    def source_dies(self) -> None:
        self.source = Replica(type(self.source.ownership), self.source.ownership.epoch + 1)
        for q, state in self.at_source.items():
            if state == "prefilling":
                self.at_source[q] = "ended"

    def target_dies(self) -> None:
        """Its requests are resent by the gateway, to be computed here: the simplest fallback."""
        self.target = Replica(type(self.target.ownership), self.target.ownership.epoch + 1)
        for q, state in self.at_target.items():
            if state in ("loading", "running"):
                self.at_target[q] = "waiting"

    def events(self) -> Iterator[tuple[str, int, Callable[[World], object]]]:
        """Replicas touched, price in faults, and what happens."""
        yield from self._request_events()
        yield from self._fate_events()

    def _request_events(self) -> Iterator[tuple[str, int, Callable[[World], object]]]:
        """The requests are alike, so A may as well come first."""
        for q in self.at_source:
            here, there = self.at_source[q], self.at_target[q]
            has_offer = any(m.kind == "offer" and m.request == q for m in self.messages)
            if here == "waiting" and (q == "A" or self.at_source["A"] != "waiting"):
                yield "source", 0, lambda w, q=q: w.prefill(q)
            if here == "prefilling":
                yield "source", 0, lambda w, q=q: w.end_prefill(q)
                yield "source", 1, lambda w, q=q: w.abort_prefill(q)
            if q in self.source.busy:
                yield "source", 0, lambda w, q=q: w.end_read(q)
            if there == "waiting" and here == "ended" and not has_offer:
                yield "target", 0, lambda w, q=q: w.compute(q)
            if there == "loading" and q not in self.target.busy:
                yield "target", 0, lambda w, q=q: w.give_up(q)
            if there in ("loading", "running"):
                yield "target", 1, lambda w, q=q: w.abort_decode(q)
            if q in self.target.busy:
                yield "target", 0, lambda w, q=q: w.end_write(q)
            if there == "running":
                yield "target", 0, lambda w, q=q: w.end_decode(q)

    def _fate_events(self) -> Iterator[tuple[str, int, Callable[[World], object]]]:
        for name in ("source", "target"):
            transfers = getattr(self, name).ownership._transfers
            for number, transfer in transfers.items():
                if not transfer.is_closing and transfer.deadline_s > 0:
                    yield name, 0, lambda w, name=name, number=number: _expire(w, name, number)
            if any(t.is_closing or t.deadline_s <= 0 for t in transfers.values()):
                yield name, 0, lambda w, name=name: getattr(w, name).ownership.collect()
        for message in sorted(self.messages):
            side = "target" if message.kind in ("offer", "data") else "source"
            yield side, 0, lambda w, m=message: w.deliver(m) and setattr(w, "messages", w.messages - {m})
            yield side, 1, lambda w, m=message: w.deliver(m)
            yield "", 1, lambda w, m=message: setattr(w, "messages", w.messages - {m})
        yield "source", 1, lambda w: w.source_dies()
        yield "target", 1, lambda w: w.target_dies()

    def check_end(self) -> None:
        """Nothing more can happen: all is over and every block is back."""
        for name in ("source", "target"):
            replica = getattr(self, name)
            if replica.pool.num_free != NUM_BLOCKS or replica.ownership.has_transfers:
                raise Violation(f"the {name} has leaked {NUM_BLOCKS - replica.pool.num_free} blocks")
        if {*self.at_source.values(), *self.at_target.values()} != {"ended"}:
            raise Violation(f"a request never ends: {self.at_source}, {self.at_target}")


def _expire(world: World, name: str, number: int) -> None:
    getattr(world, name).ownership._transfers[number].deadline_s = 0.0


def explore(kind: type[KVOwnership], requests: str = "AB", num_faults: int = NUM_FAULTS) -> tuple[int, int]:
    """Visits every reachable state; returns how many there are and how many are ends. Raises AssertionError for a bad one."""
    first = World(
        source=Replica(kind, 1),
        target=Replica(kind, 1),
        at_source=dict.fromkeys(requests, "waiting"),
        at_target=dict.fromkeys(requests, "waiting"),
        num_faults_left=num_faults,
    )
    keys = {first.key(): 0}  # state -> its number
    successors: list[list[int]] = []
    frontier = [first]
    num_ends = 0
    for world in frontier:  # grows while it is walked
        followers: list[int] = []
        is_end = True
        own_key = world.key()
        for touched, price, happen in world.events():
            if price > world.num_faults_left:
                continue
            after = world.clone(touched)
            after.num_faults_left -= price
            happen(after)
            for name in touched.split():
                getattr(after, name).settle()
            key = after.key()
            if key == own_key:
                continue
            is_end = is_end and price > 0
            if key not in keys:
                for name in touched.split():
                    getattr(after, name).check()
                keys[key] = len(keys)
                frontier.append(after)
            followers.append(keys[key])
        if is_end:  # only a fault could go on from here, and none must be needed
            world.check_end()
            num_ends += 1
        successors.append(followers)
        frontier[len(successors) - 1] = None  # type: ignore[call-overload]  # memory
    _check_acyclic(successors)
    return len(keys), num_ends


def _check_acyclic(successors: list[list[int]]) -> None:
    """Kahn's order reaches every state exactly when no run goes on for ever."""
    num_before = [0] * len(successors)
    for followers in successors:
        for follower in followers:
            num_before[follower] += 1
    ready = [number for number, count in enumerate(num_before) if count == 0]
    for number in ready:
        for follower in successors[number]:
            num_before[follower] -= 1
            if num_before[follower] == 0:
                ready.append(follower)
    if len(ready) != len(successors):
        raise Violation("a run can go on for ever")
