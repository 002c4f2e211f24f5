"""Which replica caches which block: an exact mirror of the numbered KV events that replicas report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvcache.events import BlockStored, KVEvent, Tier
from kvcache.hashing import BlockKey

_TIER_BIT = {Tier.DEVICE: 1, Tier.HOST: 2, Tier.DISK: 4}


class _Node:
    """A block that some replica holds, or the parent of such a block. `mask` has one bit per replica slot."""

    __slots__ = ("children", "is_root", "key", "mask", "parent")

    def __init__(self, key: BlockKey, parent: _Node | None) -> None:
        self.key = key
        self.parent = parent
        self.mask = 0
        self.is_root = False  # set by a lookup that starts at one of its children: replicas never store a root
        self.children: _Node | set[_Node] | None = None  # a set only where there are several children

    def add_child(self, child: _Node) -> None:
        children = self.children
        if children is None:
            self.children = child
        elif isinstance(children, set):
            children.add(child)
        else:
            self.children = {children, child}

    def drop_child(self, child: _Node) -> None:
        if isinstance(self.children, set):
            self.children.discard(child)
            if not self.children:
                self.children = None
        else:
            self.children = None

    def each_child(self) -> tuple[_Node, ...] | set[_Node]:
        children = self.children
        if children is None:
            return ()
        return children if isinstance(children, set) else (children,)


class _Holder:
    """One replica's part of the index."""

    __slots__ = ("bit", "blocks", "epoch", "needs_resync", "next_event", "num_broken", "replica_id", "slot")

    def __init__(self, replica_id: str, slot: int, epoch: int) -> None:
        self.replica_id = replica_id
        self.slot = slot
        self.bit = 1 << slot
        self.epoch = epoch
        self.next_event = 0
        self.needs_resync = False
        self.blocks: dict[BlockKey, int] = {}  # key -> bits of the tiers that hold it
        self.num_broken = 0  # held blocks whose parent is neither held nor a root


class PrefixIndex:
    """Owns, for each replica, exactly the blocks that it last reported, so the index is bounded by their sum.

    A lookup counts leading blocks. Where every block's parent is held too (true as long as tails are evicted before heads), the set of
    replicas that hold position i only shrinks with i, and a bisection over positions finds every replica's depth in a few dictionary
    reads. Missing parents ("broken links") are counted per replica, and a replica with one is walked block by block: always exact,
    and slower only for such replicas.
    """

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, _Node] = {}
        self._holders: dict[str, _Holder] = {}
        self._slots: list[_Holder | None] = []
        self._broken_mask = 0  # bits of the replicas with a broken link

    @property
    def num_nodes(self) -> int:
        """Number of distinct blocks, plus parents that no replica holds (at most one per block)."""
        return len(self._nodes)

    def num_blocks(self, replica_id: str) -> int:
        """Number of blocks that the replica reported."""
        holder = self._holders.get(replica_id)
        return len(holder.blocks) if holder is not None else 0

    def holds(self, replica_id: str, key: BlockKey) -> bool:
        """Whether the replica reported this block, with or without the blocks before it."""
        holder = self._holders.get(replica_id)
        return holder is not None and key in holder.blocks

    def apply(self, replica_id: str, *, epoch: int, first_event: int, events: Sequence[KVEvent], is_full_state: bool = False) -> bool:
        """Applies the events of one report; True when the replica must send its full state next.

        Repeated and older reports change nothing. After a gap the last known state stays until the full state arrives.
        With `is_full_state`, `events` lists every block in any order and the next change has number `first_event`.
        Reports of an older epoch are ignored; a newer epoch drops everything known about the replica.
        """
        holder = self._holders.get(replica_id)
        if holder is not None and epoch < holder.epoch:
            return False
        if holder is None or epoch > holder.epoch:
            self.remove(replica_id)
            holder = self._add(replica_id, epoch)
        if is_full_state:
            if first_event < holder.next_event:
                return holder.needs_resync
            self._clear(holder)
            fresh: Sequence[KVEvent] = events
            holder.next_event = first_event
            holder.needs_resync = False
        elif holder.needs_resync:
            return True
        elif first_event > holder.next_event:
            holder.needs_resync = True
            return True
        else:
            known = holder.next_event - first_event
            fresh = events if known == 0 else tuple(islice(events, known, None))
            holder.next_event += len(fresh)
        for event in fresh:
            if isinstance(event, BlockStored):
                self._store(holder, event)
            else:
                self._evict(holder, event.key, _TIER_BIT[event.tier])
        return False

    def remove(self, replica_id: str) -> None:
        """Forgets a replica; unknown ids are ignored."""
        holder = self._holders.pop(replica_id, None)
        if holder is not None:
            self._clear(holder)
            self._slots[holder.slot] = None

    def match(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """Replica id -> number of leading blocks of `keys` that it holds; replicas without any are left out."""
        first = self._nodes.get(keys[0]) if keys else None
        if first is None or not first.mask:
            return {}
        assert first.parent is not None
        if not first.parent.is_root:
            self._mark_root(first.parent)
        depths: dict[str, int] = {}
        walked = first.mask & self._broken_mask
        bisected = first.mask & ~walked
        if bisected:
            self._bisect(keys, bisected, depths)
        if walked:
            self._walk(keys, walked, depths)
        return depths

    def check(self) -> None:
        """Raises AssertionError when the index is inconsistent. Slow; for tests and soak runs."""
        for holder in self._holders.values():
            broken = 0
            for key, tiers in holder.blocks.items():
                node = self._nodes[key]
                assert tiers, "a block is held in no tier"
                assert node.mask & holder.bit, "a held block has no bit in the index"
                assert node.parent is not None
                broken += not (node.parent.mask & holder.bit or node.parent.is_root)
            assert broken == holder.num_broken, f"{holder.replica_id}: {holder.num_broken} broken links counted, {broken} found"
            assert bool(self._broken_mask & holder.bit) == (broken > 0), "the broken mask disagrees with the counts"
        held = sum(node.mask.bit_count() for node in self._nodes.values())
        assert held == sum(len(holder.blocks) for holder in self._holders.values()), "the index has bits of unknown replicas"
        assert all(node.mask or node.children for node in self._nodes.values()), "an empty node was left behind"

    def _add(self, replica_id: str, epoch: int) -> _Holder:
        slot = self._slots.index(None) if None in self._slots else len(self._slots)
        holder = _Holder(replica_id, slot, epoch)
        if slot == len(self._slots):
            self._slots.append(holder)
        else:
            self._slots[slot] = holder
        self._holders[replica_id] = holder
        return holder

    def _store(self, holder: _Holder, event: BlockStored) -> None:
        tiers = holder.blocks.get(event.key, 0)
        holder.blocks[event.key] = tiers | _TIER_BIT[event.tier]
        if tiers:
            return
        node = self._nodes.get(event.key)
        if node is None:
            node = self._nodes[event.key] = _Node(event.key, None)
        parent = node.parent
        if parent is None:
            parent = self._nodes.get(event.parent)
            if parent is None:
                parent = self._nodes[event.parent] = _Node(event.parent, None)
            node.parent = parent
            parent.add_child(node)
        bit = holder.bit
        node.mask |= bit
        change = 0 if parent.mask & bit or parent.is_root else 1
        for child in node.each_child():
            if child.mask & bit:
                change -= 1
        if change:
            self._count_broken(holder, change)

    def _evict(self, holder: _Holder, key: BlockKey, tier_bit: int) -> None:
        tiers = holder.blocks.get(key, 0)
        left = tiers & ~tier_bit
        if left:
            holder.blocks[key] = left
        elif tiers:
            del holder.blocks[key]
            node = self._nodes[key]
            bit = holder.bit
            assert node.parent is not None
            change = 0 if node.parent.mask & bit or node.parent.is_root else -1
            for child in node.each_child():
                if child.mask & bit:
                    change += 1
            node.mask &= ~bit
            if change:
                self._count_broken(holder, change)
            self._prune(node)

    def _prune(self, node: _Node | None) -> None:
        """Removes a node, and then its ancestors, while no replica holds it and it has no children."""
        while node is not None and not node.mask and node.children is None:
            del self._nodes[node.key]
            parent = node.parent
            if parent is not None:
                parent.drop_child(node)
            node = parent

    def _clear(self, holder: _Holder) -> None:
        keep = ~holder.bit
        for key in holder.blocks:
            node = self._nodes[key]
            node.mask &= keep
            self._prune(node)
        holder.blocks.clear()
        holder.num_broken = 0
        self._broken_mask &= keep

    def _count_broken(self, holder: _Holder, change: int) -> None:
        holder.num_broken += change
        if holder.num_broken:
            self._broken_mask |= holder.bit
        else:
            self._broken_mask &= ~holder.bit

    def _mark_root(self, node: _Node) -> None:
        node.is_root = True
        for child in node.each_child():
            for holder in self._holders_in(child.mask & ~node.mask):
                self._count_broken(holder, -1)

    def _holders_in(self, mask: int) -> list[_Holder]:
        slots = self._slots
        if mask.bit_count() * 8 > mask.bit_length():
            # dense: reading digits takes one pass over the integer, clearing bits takes one pass per bit
            found = [slots[slot] for slot, digit in enumerate(reversed(f"{mask:b}")) if digit == "1"]
        else:
            found = []
            while mask:
                slot = mask.bit_length() - 1
                found.append(slots[slot])
                mask ^= 1 << slot
        return [holder for holder in found if holder is not None]

    def _bisect(self, keys: Sequence[BlockKey], mask: int, depths: dict[str, int]) -> None:
        """Fills `depths` for the replicas in `mask`, which have no broken links."""
        nodes = self._nodes
        last = nodes.get(keys[-1])
        hi, hi_mask = len(keys) - 1, last.mask & mask if last is not None else 0
        if hi_mask:
            self._set_depth(hi_mask, len(keys), depths)
        # (lo, replicas that hold position lo, hi, replicas that hold position hi): fewer at hi, so some end in between
        spans = [(0, mask, hi, hi_mask)] if mask != hi_mask else []
        while spans:
            lo, lo_mask, hi, hi_mask = spans.pop()
            while hi - lo > 1:
                middle = (lo + hi) // 2
                node = nodes.get(keys[middle])
                middle_mask = node.mask & mask if node is not None else 0
                if middle_mask == lo_mask:
                    lo = middle
                    continue
                if middle_mask != hi_mask:
                    spans.append((middle, middle_mask, hi, hi_mask))
                hi, hi_mask = middle, middle_mask
            self._set_depth(lo_mask & ~hi_mask, lo + 1, depths)

    def _walk(self, keys: Sequence[BlockKey], mask: int, depths: dict[str, int]) -> None:
        for position, key in enumerate(keys):
            node = self._nodes.get(key)
            held = node.mask & mask if node is not None else 0
            if held != mask:
                self._set_depth(mask & ~held, position, depths)
                mask = held
                if not mask:
                    return
        self._set_depth(mask, len(keys), depths)

    def _set_depth(self, mask: int, depth: int, depths: dict[str, int]) -> None:
        if not mask & (mask - 1):  # one replica, the common case
            holder = self._slots[mask.bit_length() - 1] if mask else None
            if holder is not None:
                depths[holder.replica_id] = depth
            return
        for holder in self._holders_in(mask):
            depths[holder.replica_id] = depth
