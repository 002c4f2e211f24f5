"""Finding and publishing whole sequences, over a real pool; keys are SHA-256 chains computed by hand."""

from __future__ import annotations

import hashlib
import struct

import pytest

from kvcache.block_pool import BlockPool
from kvcache.events import BlockStored
from kvcache.prefix_cache import PrefixCache

ROOT = hashlib.sha256(b"manta-kv-1" + bytes(24)).digest()
TOKENS = (1, 2, 3, 4, 5)


def chained(parent: bytes, *token_ids: int) -> bytes:
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()


FIRST = chained(ROOT, 1, 2)
SECOND = chained(FIRST, 3, 4)


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(6, 2)


def held(pool: BlockPool, num_blocks: int) -> list[int]:
    block_ids = pool.try_allocate(num_blocks)
    assert block_ids is not None
    return block_ids


def test_chain_keys_are_the_hashes_of_each_full_block_and_its_parent(pool: BlockPool) -> None:
    chain = PrefixCache(pool).chain("", None)
    assert chain.key(1, TOKENS) == SECOND, "asked out of order"
    assert chain.key(0, TOKENS) == FIRST
    assert (chain.parent(0), chain.parent(1)) == (ROOT, FIRST)


def test_chain_grows_with_its_sequence(pool: BlockPool) -> None:
    chain = PrefixCache(pool).chain("", None)
    assert chain.key(0, (1, 2)) == FIRST
    assert chain.key(1, (1, 2, 3, 4)) == SECOND


def test_chain_of_a_block_that_is_not_full_is_a_bug(pool: BlockPool) -> None:
    chain = PrefixCache(pool).chain("", None)
    with pytest.raises(AssertionError, match="block 2 is not full"):
        chain.key(2, TOKENS)


@pytest.mark.parametrize(
    ("salt", "adapter_id", "weights_version"), [("tenant", None, ""), ("", "law", ""), ("", None, "2")], ids=["salt", "adapter", "weights"]
)
def test_sequence_of_another_identity_is_not_found(pool: BlockPool, salt: str, adapter_id: str | None, weights_version: str) -> None:
    cache = PrefixCache(pool)
    cache.publish(cache.chain("", None), TOKENS, held(pool, 2), 0, 2)
    other = PrefixCache(pool, weights_version=weights_version)
    assert other.match(other.chain(salt, adapter_id), TOKENS) == []
    assert len(cache.match(cache.chain("", None), TOKENS)) == 2


def test_match_is_the_longest_run_from_the_start(pool: BlockPool) -> None:
    cache = PrefixCache(pool)
    blocks = held(pool, 2)
    cache.publish(cache.chain("", None), TOKENS, blocks, 0, 2)
    assert cache.match(cache.chain("", None), (1, 2, 3, 4, 9)) == blocks
    assert cache.match(cache.chain("", None), (1, 2, 9, 4, 5)) == blocks[:1]
    assert cache.match(cache.chain("", None), (9, 2, 3, 4, 5)) == []


def test_match_after_a_gap_in_the_cache_stops_there(pool: BlockPool) -> None:
    cache = PrefixCache(pool)
    cache.publish(cache.chain("", None), TOKENS, held(pool, 2), 1, 2)
    assert cache.match(cache.chain("", None), TOKENS) == []


@pytest.mark.parametrize(("num_tokens", "num_found"), [(0, 0), (2, 0), (3, 1), (4, 1), (5, 2)])
def test_match_leaves_the_last_token_to_be_computed(pool: BlockPool, num_tokens: int, num_found: int) -> None:
    cache = PrefixCache(pool)
    blocks = held(pool, 2)
    cache.publish(cache.chain("", None), TOKENS, blocks, 0, 2)
    assert cache.match(cache.chain("", None), TOKENS[:num_tokens]) == blocks[:num_found]


def test_match_holds_no_block(pool: BlockPool) -> None:
    cache = PrefixCache(pool)
    blocks = held(pool, 2)
    cache.publish(cache.chain("", None), TOKENS, blocks, 0, 2)
    pool.release(blocks)
    assert cache.match(cache.chain("", None), TOKENS) == blocks
    assert [pool.ref_count(block_id) for block_id in blocks] == [0, 0]


def test_publish_names_blocks_and_parents_and_returns_what_became_findable(pool: BlockPool) -> None:
    cache = PrefixCache(pool)
    blocks = held(pool, 2)
    assert cache.publish(cache.chain("", None), TOKENS, blocks, 0, 2) == blocks
    assert pool.events.since(0) == (BlockStored(FIRST, ROOT), BlockStored(SECOND, FIRST))


def test_publish_of_what_another_block_holds_leaves_that_one_findable(pool: BlockPool) -> None:
    cache = PrefixCache(pool)
    blocks, again = held(pool, 1), held(pool, 2)
    cache.publish(cache.chain("", None), TOKENS, blocks, 0, 1)
    assert cache.publish(cache.chain("", None), TOKENS, again, 0, 2) == again[1:]
    assert cache.match(cache.chain("", None), TOKENS) == [blocks[0], again[1]]


def test_disabled_cache_finds_and_publishes_nothing(pool: BlockPool) -> None:
    cache = PrefixCache(pool)
    cache.publish(cache.chain("", None), TOKENS, held(pool, 2), 0, 2)
    disabled = PrefixCache(pool, enabled=False)
    assert disabled.match(disabled.chain("", None), TOKENS) == []
    assert disabled.find(disabled.chain("", None), TOKENS, 0) is None
    assert disabled.publish(disabled.chain("", None), (7, 8, 9), held(pool, 1), 0, 1) == []
    assert pool.statistics().num_cached == 2
