"""Allocates blocks for the tokens of running requests, and publishes their content for prefix hits. Free of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvcache.block_pool import BlockPool
from kvcache.prefix_cache import BlockKeyChain, PrefixCache
from replicas.request import GenerationRequest
from replicas.scheduling.request_state import RequestState


class BlockTables:
    """Fills, grows and frees the block tables of requests from one pool. Owns no request.

    While requests run, one block in a hundred is kept back from new requests and drafts, so that running ones can grow.
    """

    def __init__(self, pool: BlockPool, *, enable_prefix_caching: bool, weights_version: str) -> None:
        self.pool = pool
        self._prefix_cache = PrefixCache(pool, enabled=enable_prefix_caching, weights_version=weights_version)
        self._watermark_blocks = pool.num_blocks // 100

    def chain(self, request: GenerationRequest) -> BlockKeyChain:
        return self._prefix_cache.chain(request.cache_salt, request.adapter_id)

    def try_fill(self, state: RequestState, *, has_others: bool) -> bool:
        """Gives a request without blocks those for all its tokens, sharing cached ones; False, without a change, if too few are free."""
        cached = self._prefix_cache.match(state.chain, state.token_ids)
        if state.num_scored < state.num_to_score:  # cached KV has no logits
            cached = cached[: state.num_scored // self.pool.block_size]
        num_new = self._num_blocks_for(len(state.token_ids)) - len(cached)
        # Counted before any block is retained: a failed try must not count as a use of the cached blocks.
        num_taken = num_new + sum(self.pool.ref_count(block_id) == 0 for block_id in cached)
        if self.pool.num_free < num_taken + (self._watermark_blocks if has_others else 0):
            return False
        for block_id in cached:
            self.pool.retain(block_id)
        new = self.pool.try_allocate(num_new)
        assert new is not None, "the blocks were counted as free"
        state.block_ids = cached + new
        state.num_computed_tokens = len(cached) * self.pool.block_size
        return True

    def could_fill_without(self, victims: Sequence[RequestState], head: RequestState, *, has_others: bool) -> bool:
        """Whether preempting `victims` would free enough blocks for `head`; `has_others` says whether other requests still run."""
        held = Counter(block_id for state in victims for block_id in state.block_ids)
        num_theirs = sum(self.pool.ref_count(block_id) == count for block_id, count in held.items())
        headroom = self._watermark_blocks if has_others else 0
        return self.pool.num_free + num_theirs >= self._num_blocks_for(len(head.token_ids)) + headroom

    def try_grow(self, state: RequestState) -> bool:
        """Allocates one block if the request lacks any; False if none is free."""
        if self.lacks_blocks(state):
            new = self.pool.try_allocate(1)
            if new is None:
                return False
            state.block_ids += new
        return True

    def lacks_blocks(self, state: RequestState) -> bool:
        return len(state.block_ids) < self._num_blocks_for(len(state.token_ids))

    def room_for_drafts(self, state: RequestState, num_drafts: int) -> int:
        """Allocates blocks for up to `num_drafts` tokens behind the request's own, except those kept back for running requests;
        returns how many drafts have slots."""
        num_tokens, size = len(state.token_ids), self.pool.block_size
        num_new = self._num_blocks_for(num_tokens + num_drafts) - len(state.block_ids)
        num_new = min(num_new, self.pool.num_free - self._watermark_blocks)
        if num_new > 0:
            state.block_ids += self.pool.try_allocate(num_new) or []
        return min(num_drafts, len(state.block_ids) * size - num_tokens)

    def publish(self, state: RequestState, start: int, end: int) -> list[int]:
        """Publishes the keys of blocks whose last slot is among the tokens `start .. end - 1`; returns the newly findable blocks."""
        size = self.pool.block_size
        first, last = start // size, end // size
        return self._prefix_cache.publish(state.chain, state.token_ids, state.block_ids, first, last) if first < last else []

    def trim(self, state: RequestState, num_drafts: int = 0) -> None:
        """Frees the blocks that neither a token of the request nor its drafts need."""
        num_needed = self._num_blocks_for(len(state.token_ids) + num_drafts)
        if len(state.block_ids) > num_needed:
            self.pool.release(state.block_ids[num_needed:], state.request.priority)
            del state.block_ids[num_needed:]

    def release(self, state: RequestState) -> None:
        self.pool.release(state.block_ids, state.request.priority)
        state.block_ids = []

    def check(self, states: Sequence[RequestState], other_tables: Sequence[Sequence[int]]) -> None:
        """Raises AssertionError unless the pool's reference counts match the tables of these requests and `other_tables`, every
        computed token has a slot, and no request has more blocks than its tokens need."""
        self.pool.check()
        self.pool.check_holders([*(state.block_ids for state in states), *other_tables])
        size = self.pool.block_size
        for state in states:
            assert len(state.block_ids) * size >= state.num_computed_tokens, "a request lacks blocks"
            assert len(state.block_ids) * size - len(state.token_ids) < size, "more than one block's slots are unused"

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)
