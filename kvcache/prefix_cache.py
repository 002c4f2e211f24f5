"""Finds cached KV blocks for sequences with common prefixes."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.block_pool import BlockPool
from kvcache.hashing import BlockKey, CacheIdentity, block_key


class BlockKeyChain:
    """The keys of one sequence's full blocks, computed once each as the sequence grows."""

    def __init__(self, identity: CacheIdentity, block_size: int) -> None:
        self._root = identity.root_key()
        self._block_size = block_size
        self._keys: list[BlockKey] = []

    def key(self, index: int, token_ids: Sequence[int]) -> BlockKey:
        """Key of block `index`, which must be full; `token_ids` is the whole sequence so far."""
        size = self._block_size
        assert (index + 1) * size <= len(token_ids), f"block {index} is not full"
        while len(self._keys) <= index:
            start = len(self._keys) * size
            self._keys.append(block_key(self.parent(len(self._keys)), token_ids[start : start + size]))
        return self._keys[index]

    def parent(self, index: int) -> BlockKey:
        """Key of the block before `index`; requires an earlier call of `key(index - 1)`."""
        return self._keys[index - 1] if index else self._root


class PrefixCache:
    """Finds and publishes the blocks of whole sequences in the pool. With `enabled=False` it does neither."""

    def __init__(self, pool: BlockPool, *, enabled: bool = True, weights_version: str = "") -> None:
        self._pool = pool
        self._enabled = enabled
        self._weights_version = weights_version

    def chain(self, salt: str, adapter_id: str | None) -> BlockKeyChain:
        identity = CacheIdentity(salt=salt, adapter_id=adapter_id, weights_version=self._weights_version)
        return BlockKeyChain(identity, self._pool.block_size)

    def find(self, chain: BlockKeyChain, token_ids: Sequence[int], index: int) -> int | None:
        """The cached block with the content of block `index` of the sequence; None when there is none."""
        if not self._enabled:
            return None
        size = self._pool.block_size
        return self._pool.find(chain.key(index, token_ids), token_ids[index * size : (index + 1) * size])

    def match(self, chain: BlockKeyChain, token_ids: Sequence[int]) -> list[int]:
        """The longest run of cached blocks from the start; they are not retained yet.

        The last token is never included, because it must be computed to get logits.
        """
        block_ids: list[int] = []
        for index in range((len(token_ids) - 1) // self._pool.block_size):
            block_id = self.find(chain, token_ids, index)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def publish(self, chain: BlockKeyChain, token_ids: Sequence[int], block_ids: Sequence[int], first: int, end: int) -> list[int]:
        """Makes blocks `first .. end - 1` of the sequence findable; returns the ids of the blocks that became findable."""
        if not self._enabled:
            return []
        size = self._pool.block_size
        published: list[int] = []
        for index in range(first, end):
            key = chain.key(index, token_ids)
            if self._pool.publish(block_ids[index], key, chain.parent(index), token_ids[index * size : (index + 1) * size]):
                published.append(block_ids[index])
        return published
