"""The block pool: what it hands out, what it keeps findable, what it evicts first."""

import pytest

from kvcache.block_pool import BlockPool
from kvcache.events import BlockEvicted, BlockStored
from kvcache.hashing import CacheIdentity, block_key, block_keys


def _publish(pool: BlockPool, block_id: int, *tokens: int) -> bytes:
    key = block_key(b"root", tokens)
    assert pool.publish(block_id, key, b"root", tokens)
    return key


def test_allocate_more_than_free_returns_none_and_changes_nothing() -> None:
    pool = BlockPool(3, 2)
    assert pool.try_allocate(2) is not None
    assert pool.try_allocate(2) is None
    assert pool.num_free == 1
    pool.check()


def test_freed_block_stays_findable_until_it_is_allocated_anew() -> None:
    pool = BlockPool(1, 2)
    (block,) = pool.try_allocate(1) or []
    key = _publish(pool, block, 1, 2)
    pool.release([block])
    assert pool.find(key, (1, 2)) == block
    assert pool.try_allocate(1) == [block]
    assert pool.find(key, (1, 2)) is None
    assert pool.events.since(0) == (BlockStored(key, b"root"), BlockEvicted(key))


def test_find_with_a_colliding_key_but_other_tokens_is_no_hit() -> None:
    pool = BlockPool(1, 2)
    (block,) = pool.try_allocate(1) or []
    key = _publish(pool, block, 1, 2)
    assert pool.find(key, (1, 3)) is None


def test_eviction_takes_blank_blocks_first_then_the_tail_of_the_oldest() -> None:
    pool = BlockPool(5, 1)
    first, second = pool.try_allocate(2) or [], pool.try_allocate(2) or []
    for token, block in enumerate(first + second):
        _publish(pool, block, token)
    pool.release(first)
    pool.release(second)
    order = [(pool.try_allocate(1) or [])[0] for _ in range(5)]
    assert order[1:] == [first[1], first[0], second[1], second[0]]


def test_eviction_keeps_blocks_of_more_urgent_requests_longer() -> None:
    pool = BlockPool(2, 1)
    urgent, other = pool.try_allocate(2) or []
    _publish(pool, urgent, 1)
    _publish(pool, other, 2)
    pool.release([urgent], priority=0)
    pool.release([other], priority=1)
    assert pool.try_allocate(1) == [other]


def test_eviction_of_an_urgent_block_untouched_for_many_turnovers_happens() -> None:
    pool = BlockPool(2, 1)
    urgent, other = pool.try_allocate(2) or []
    _publish(pool, urgent, 1)
    _publish(pool, other, 2)
    pool.release([urgent], priority=-1)
    for _ in range(2 * pool.num_blocks):
        pool.release([other], priority=0)
        pool.retain(other)
    pool.release([other], priority=0)
    assert pool.try_allocate(1) == [urgent]


def test_retain_of_a_free_block_takes_it_out_of_eviction() -> None:
    pool = BlockPool(1, 1)
    (block,) = pool.try_allocate(1) or []
    _publish(pool, block, 1)
    pool.release([block])
    pool.retain(block)
    assert pool.try_allocate(1) is None
    pool.check_holders([[block]])


def test_release_of_a_free_block_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="not held"):
        BlockPool(1, 1).release([0])


def test_publish_of_a_known_key_leaves_the_second_block_private() -> None:
    pool = BlockPool(2, 1)
    one, two = pool.try_allocate(2) or []
    key = _publish(pool, one, 7)
    assert not pool.publish(two, key, b"root", (7,))
    assert pool.find(key, (7,)) == one


def test_forget_makes_held_and_free_blocks_unfindable() -> None:
    pool = BlockPool(2, 1)
    held, free = pool.try_allocate(2) or []
    keys = [_publish(pool, held, 1), _publish(pool, free, 2)]
    pool.release([free])
    pool.forget([held, free])
    assert [pool.find(key, (token,)) for key, token in zip(keys, (1, 2), strict=True)] == [None, None]
    pool.check()


def test_stored_blocks_lists_parents_first() -> None:
    pool = BlockPool(3, 1)
    blocks = pool.try_allocate(3) or []
    keys = block_keys(CacheIdentity(), [5, 6, 7], 1)
    for index in (2, 0, 1):
        parent = keys[index - 1] if index else CacheIdentity().root_key()
        assert pool.publish(blocks[index], keys[index], parent, [5 + index])
    assert [event.key for event in pool.stored_blocks()] == keys


def test_check_finds_a_lost_block() -> None:
    pool = BlockPool(2, 1)
    pool._blank.pop()
    with pytest.raises(AssertionError, match="lost"):
        pool.check()


def test_block_keys_differ_by_salt_adapter_weights_and_history() -> None:
    identities = [CacheIdentity(), CacheIdentity(salt="a"), CacheIdentity(adapter_id="a"), CacheIdentity(weights_version="a")]
    keys = {block_keys(identity, [1, 2], 2)[0] for identity in identities}
    assert len(keys) == 4
    assert block_keys(CacheIdentity(), [1, 2, 3, 4], 2)[1] != block_keys(CacheIdentity(), [9, 9, 3, 4], 2)[1]
    assert len(block_keys(CacheIdentity(), [1, 2, 3], 2)) == 1
