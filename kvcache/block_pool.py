"""Which KV blocks are held, free or findable. Bookkeeping only: the tensors are elsewhere, indexed by block id."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcache.events import BlockEvicted, BlockStored, KVEventLog
from kvcache.hashing import BlockKey

MAX_PRIORITY_WEIGHT = 8


@dataclass(slots=True)
class _Block:
    ref_count: int = 0
    key: BlockKey | None = None
    parent: BlockKey = b""
    token_bytes: bytes = b""  # the tokens behind `key`, to verify a hit
    priority: int = 0  # the last holder's; orders eviction
    freed_at: int = 0  # tick of the release that made it free


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    num_blocks: int
    num_free: int
    """Blocks without a holder; some of them may be findable."""
    num_cached: int
    """Findable blocks, held or free."""


class BlockPool:
    """Owns reference counts, prefix keys and the eviction order of `num_blocks` blocks of `block_size` tokens.

    Always: a block is held (ref count above 0) or free, never both; a key names at most one block; a free block with a
    key stays findable until it is allocated again. Blank blocks are allocated first, then the least recently freed, where
    each unit of priority (smaller is more urgent) counts as one turnover of the whole pool.
    """

    def __init__(self, num_blocks: int, block_size: int, events: KVEventLog | None = None) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, got {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.events = events if events is not None else KVEventLog()
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._blank = list(range(num_blocks - 1, -1, -1))  # free, no key; a stack
        self._evictable: dict[int, OrderedDict[int, None]] = {}  # priority -> free blocks with a key, oldest first
        self._num_evictable = 0
        self._by_key: dict[BlockKey, int] = {}  # key -> block_id
        self._tick = 0

    @property
    def num_free(self) -> int:
        return len(self._blank) + self._num_evictable

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(num_blocks=self.num_blocks, num_free=self.num_free, num_cached=len(self._by_key))

    def try_allocate(self, num_blocks: int) -> list[int] | None:
        """Takes free blocks, each then with one holder and no key. None, and nothing changed, when too few are free."""
        if num_blocks > self.num_free:
            return None
        return [self._take_free() for _ in range(num_blocks)]

    def retain(self, block_id: int) -> None:
        """Adds a holder; a free block leaves the eviction order."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            assert block.key is not None, f"block {block_id} is blank: allocate it instead"
            self._leave_evictable(block_id)
        block.ref_count += 1

    def release(self, block_ids: Sequence[int], priority: int = 0) -> None:
        """Removes a holder from each block of a sequence, given head first; the tail is evicted before the head."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is released but not held"
            block.ref_count -= 1
            block.priority = max(-MAX_PRIORITY_WEIGHT, min(MAX_PRIORITY_WEIGHT, priority))
            if block.ref_count == 0:
                self._become_free(block_id)

    def ref_count(self, block_id: int) -> int:
        return self._blocks[block_id].ref_count

    def find(self, key: BlockKey, token_ids: Sequence[int]) -> int | None:
        """The block with `key`, held or free; None when there is none or its tokens differ from `token_ids`."""
        block_id = self._by_key.get(key)
        if block_id is None or self._blocks[block_id].token_bytes != array("q", token_ids).tobytes():
            return None
        return block_id

    def publish(self, block_id: int, key: BlockKey, parent: BlockKey, token_ids: Sequence[int]) -> bool:
        """Makes a held block findable. False when another block already has the key; this one then stays private."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is published but not held"
        assert block.key is None, f"block {block_id} is published twice"
        if key in self._by_key:
            return False
        block.key, block.parent, block.token_bytes = key, parent, array("q", token_ids).tobytes()
        self._by_key[key] = block_id
        self.events.append(BlockStored(key, parent))
        return True

    def forget(self, block_ids: Iterable[int]) -> None:
        """Makes blocks unfindable, because their content is invalid (a failed step) or unwanted. Holders keep them."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.key is not None:
                if block.ref_count == 0:
                    self._leave_evictable(block_id)
                    self._blank.append(block_id)
                self._drop_key(block)

    def stored_blocks(self) -> tuple[BlockStored, ...]:
        """Every findable block, parents before children where both exist: the full state for a resync."""
        order: list[BlockStored] = []
        done: set[BlockKey] = set()
        for key in self._by_key:
            chain: list[BlockStored] = []
            while key not in done and (block_id := self._by_key.get(key)) is not None:
                done.add(key)
                chain.append(BlockStored(key, self._blocks[block_id].parent))
                key = self._blocks[block_id].parent
            order.extend(reversed(chain))
        return tuple(order)

    def check(self) -> None:
        """Raises AssertionError when an invariant of this class does not hold. O(num_blocks)."""
        free = set(self._blank)
        assert len(free) == len(self._blank), "a blank block is in the free list twice"
        for priority, blocks in self._evictable.items():
            for block_id in blocks:
                assert block_id not in free, f"block {block_id} is free twice"
                assert self._blocks[block_id].priority == priority, f"block {block_id} is in the wrong eviction class"
                free.add(block_id)
        assert len(free) == self.num_free, "the count of free blocks is wrong"
        for block_id, block in enumerate(self._blocks):
            assert block.ref_count >= 0, f"block {block_id} has a negative count"
            assert (block.ref_count == 0) == (block_id in free), f"block {block_id} is held and free, or neither: lost"
            if block.key is not None:
                assert self._by_key.get(block.key) == block_id, f"block {block_id} has a key that names another"
        assert all(block.key is None for block in map(self._blocks.__getitem__, self._blank)), "a blank block has a key"
        assert all(self._blocks[b].key == key for key, b in self._by_key.items()), "a key names a block without it"

    def check_holders(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless each ref count equals the number of these block tables that contain the block."""
        counts = [0] * self.num_blocks
        for table in block_tables:
            assert len(set(table)) == len(table), "a block is in one table twice"
            for block_id in table:
                counts[block_id] += 1
        for block_id, block in enumerate(self._blocks):
            assert block.ref_count == counts[block_id], f"block {block_id}: {block.ref_count} references, {counts[block_id]} holders"

    def _take_free(self) -> int:
        if self._blank:
            block_id = self._blank.pop()
        else:
            block_id = self._oldest_evictable()
            self._leave_evictable(block_id)
            self._drop_key(self._blocks[block_id])
        self._blocks[block_id].ref_count = 1
        return block_id

    def _oldest_evictable(self) -> int:
        heads = (next(iter(blocks)) for blocks in self._evictable.values() if blocks)
        return min(heads, key=lambda b: self._blocks[b].freed_at - self._blocks[b].priority * self.num_blocks)

    def _become_free(self, block_id: int) -> None:
        block = self._blocks[block_id]
        self._tick += 1
        block.freed_at = self._tick
        if block.key is None:
            self._blank.append(block_id)
        else:
            self._evictable.setdefault(block.priority, OrderedDict())[block_id] = None
            self._num_evictable += 1

    def _leave_evictable(self, block_id: int) -> None:
        del self._evictable[self._blocks[block_id].priority][block_id]
        self._num_evictable -= 1

    def _drop_key(self, block: _Block) -> None:
        assert block.key is not None
        del self._by_key[block.key]
        self.events.append(BlockEvicted(block.key))
        block.key, block.parent, block.token_bytes = None, b"", b""
