from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.events import BlockEvicted, BlockStored, KVEvent, KVEventLog, Tier
from router.fleet.prefix_index import PrefixIndex

ROOT = b"root"


def chain(name: str, length: int, parent: bytes = ROOT) -> list[BlockStored]:
    """Stored events of one prompt's blocks, from the head."""
    events = []
    for position in range(length):
        key = f"{name}{position}".encode()
        events.append(BlockStored(key, parent))
        parent = key
    return events


def keys_of(events: list[BlockStored]) -> list[bytes]:
    return [event.key for event in events]


def test_match_prompt_held_in_part_counts_leading_blocks() -> None:
    index = PrefixIndex()
    events = chain("a", 5)
    index.apply("r0", epoch=1, first_event=0, events=events[:2])
    index.apply("r1", epoch=1, first_event=0, events=events)
    index.apply("r2", epoch=1, first_event=0, events=chain("b", 5))
    assert index.match(keys_of(events)) == {"r0": 2, "r1": 5}
    assert index.match([]) == {}
    assert index.match([b"unknown", events[0].key]) == {}


def test_match_hole_in_the_middle_ends_the_prefix() -> None:
    index = PrefixIndex()
    events = chain("a", 9)
    index.apply("r0", epoch=1, first_event=0, events=[*events, BlockEvicted(events[4].key)])
    assert index.match(keys_of(events)) == {"r0": 4}
    index.apply("r0", epoch=1, first_event=10, events=[events[4]])
    assert index.match(keys_of(events)) == {"r0": 9}
    index.check()


def test_apply_gap_asks_for_the_full_state_and_recovers() -> None:
    index = PrefixIndex()
    events = chain("a", 4)
    assert not index.apply("r0", epoch=1, first_event=0, events=events[:1])
    assert index.apply("r0", epoch=1, first_event=2, events=events[2:])
    assert index.match(keys_of(events)) == {"r0": 1}
    assert not index.apply("r0", epoch=1, first_event=4, events=events, is_full_state=True)
    assert index.match(keys_of(events)) == {"r0": 4}
    assert not index.apply("r0", epoch=1, first_event=4, events=[BlockEvicted(events[3].key)])
    assert index.match(keys_of(events)) == {"r0": 3}


def test_apply_new_epoch_voids_the_old_state() -> None:
    index = PrefixIndex()
    events = chain("a", 4)
    index.apply("r0", epoch=1, first_event=0, events=events)
    assert not index.apply("r0", epoch=2, first_event=0, events=events[:1])
    assert index.match(keys_of(events)) == {"r0": 1}
    assert not index.apply("r0", epoch=1, first_event=4, events=chain("b", 1))
    assert index.match(keys_of(events)) == {"r0": 1}
    assert index.num_nodes == 2


def test_apply_unknown_replica_in_the_middle_of_its_events_needs_resync() -> None:
    index = PrefixIndex()
    assert index.apply("r0", epoch=1, first_event=7, events=chain("a", 1))


def test_evict_one_tier_keeps_the_block_in_the_other() -> None:
    index = PrefixIndex()
    (event,) = chain("a", 1)
    both = [event, BlockStored(event.key, ROOT, Tier.HOST)]
    index.apply("r0", epoch=1, first_event=0, events=[*both, BlockEvicted(event.key)])
    assert index.match([event.key]) == {"r0": 1}
    index.apply("r0", epoch=1, first_event=3, events=[BlockEvicted(event.key, Tier.HOST)])
    assert index.match([event.key]) == {}
    assert index.num_nodes == 0


def test_remove_last_holder_leaves_nothing_behind() -> None:
    index = PrefixIndex()
    for name in ("r0", "r1"):
        index.apply(name, epoch=1, first_event=0, events=chain("a", 50))
    index.remove("r0")
    assert index.match(keys_of(chain("a", 50))) == {"r1": 50}
    index.remove("r1")
    index.remove("never seen")
    assert index.num_nodes == 0
    index.check()


def test_match_a_thousand_replicas_at_different_depths_is_exact() -> None:
    index = PrefixIndex()
    events = chain("a", 300)
    rng = random.Random(3)
    expected = {f"r{number}": rng.randint(1, 300) for number in range(1_000)}
    for name, depth in expected.items():
        index.apply(name, epoch=1, first_event=0, events=events[:depth])
    assert index.match(keys_of(events)) == expected


class PlainReplica:
    """The model: what one replica reports, and what a mirror that follows the protocol word by word knows of it."""

    def __init__(self) -> None:
        self.epoch = 1
        self.log = KVEventLog(capacity=16)
        self.blocks: dict[bytes, BlockStored] = {}
        self.seen_epoch = 0
        self.seen_next = 0
        self.seen_stale = False
        self.seen: set[bytes] = set()

    def change(self, event: KVEvent) -> None:
        if isinstance(event, BlockStored) and event.key not in self.blocks:
            self.blocks[event.key] = event
            self.log.append(event)
        elif isinstance(event, BlockEvicted) and event.key in self.blocks:
            del self.blocks[event.key]
            self.log.append(event)

    def restart(self) -> None:
        self.epoch += 1
        self.log = KVEventLog(capacity=16)
        self.blocks = {}

    def receive(self, epoch: int, first: int, events: tuple[KVEvent, ...], is_full: bool) -> None:
        if epoch < self.seen_epoch:
            return
        if epoch > self.seen_epoch:
            self.seen_epoch, self.seen_next, self.seen_stale, self.seen = epoch, 0, False, set()
        if is_full:
            if first >= self.seen_next:
                self.seen_next, self.seen_stale, self.seen = first, False, {event.key for event in events}
            return
        if self.seen_stale or first > self.seen_next:
            self.seen_stale = True
            return
        for number, event in enumerate(events, first):
            if number >= self.seen_next:
                self.seen_next = number + 1
                if isinstance(event, BlockStored):
                    self.seen.add(event.key)
                else:
                    self.seen.discard(event.key)


# a tree of 3 chains that share a trunk of 2 blocks, each 6 deep
TREE = chain("trunk", 2)
CHAINS = [TREE + chain(name, 4, TREE[-1].key) for name in "xyz"]
EVENTS = sorted({event for path in CHAINS for event in path}, key=lambda event: event.key)

ACTIONS = st.one_of(
    st.tuples(st.just("store"), st.integers(0, 2), st.integers(0, len(EVENTS) - 1)),
    st.tuples(st.just("evict"), st.integers(0, 2), st.integers(0, len(EVENTS) - 1)),
    st.tuples(st.just("report"), st.integers(0, 2), st.integers(0, 20)),
    st.tuples(st.just("full"), st.integers(0, 2), st.integers(0, 3)),
    st.tuples(st.just("deliver"), st.integers(0, 2), st.integers(0, 6)),
    st.tuples(st.just("restart"), st.integers(0, 2), st.integers(0, 0)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, max_size=120))
def test_index_under_loss_reorder_duplication_and_resync_equals_a_plain_model(actions: list[tuple[str, int, int]]) -> None:
    index = PrefixIndex()
    replicas = [PlainReplica() for _ in range(3)]
    in_flight: list[list[tuple[int, int, tuple[KVEvent, ...], bool]]] = [[], [], []]
    for action, number, value in actions:
        replica = replicas[number]
        if action == "store":
            replica.change(EVENTS[value])
        elif action == "evict":
            replica.change(BlockEvicted(EVENTS[value].key))
        elif action == "restart":
            replica.restart()
        elif action == "report":
            first = max(0, replica.log.next_number - value)
            events = replica.log.since(first)
            if events is not None:
                in_flight[number].append((replica.epoch, first, events, False))
        elif action == "full":
            in_flight[number].append((replica.epoch, replica.log.next_number, tuple(replica.blocks.values()), True))
        elif in_flight[number]:
            # any report may come, again and again, or never
            epoch, first, events, is_full = in_flight[number][value % len(in_flight[number])]
            replica.receive(epoch, first, events, is_full)
            needs_resync = index.apply(f"r{number}", epoch=epoch, first_event=first, events=events, is_full_state=is_full)
            if epoch == replica.seen_epoch:
                assert needs_resync == replica.seen_stale
        index.check()
        for path in CHAINS:
            depths = index.match(keys_of(path))
            for which, model in enumerate(replicas):
                depth = next((i for i, event in enumerate(path) if event.key not in model.seen), len(path))
                assert depths.get(f"r{which}", 0) == depth
    assert index.num_nodes <= 2 * sum(len(model.seen) for model in replicas)


@pytest.mark.parametrize("order", [1, -1])
def test_apply_full_state_in_any_order_is_exact(order: int) -> None:
    index = PrefixIndex()
    events = chain("a", 20)[::order]
    index.apply("r0", epoch=5, first_event=90, events=events, is_full_state=True)
    assert index.match(keys_of(chain("a", 20))) == {"r0": 20}
    index.check()
