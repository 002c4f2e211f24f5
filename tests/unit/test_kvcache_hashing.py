"""Keys of blocks against SHA-256 computed by hand: key = sha256(parent key, token ids, extra); ids are 8 bytes, little-endian."""

from __future__ import annotations

import hashlib
import struct

import pytest

from kvcache.hashing import CacheIdentity, block_key, block_keys


def sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def ids(*token_ids: int) -> bytes:
    return struct.pack(f"<{len(token_ids)}q", *token_ids)


EMPTY_FIELD = bytes(8)
ROOT = sha256(b"manta-kv-1", EMPTY_FIELD, EMPTY_FIELD, EMPTY_FIELD)


def test_root_key_of_an_empty_identity_is_the_hash_of_its_version_and_three_empty_fields() -> None:
    assert CacheIdentity().root_key() == ROOT
    # sha256sum of the ten bytes "manta-kv-1" and 24 zero bytes
    assert ROOT.hex() == "6e9231b7d58b3be0dd65abd855c8c5321905846c22f1346b622d80058e31bd79"


def test_root_key_holds_the_length_and_the_bytes_of_salt_adapter_and_weights_version() -> None:
    identity = CacheIdentity(salt="zoë", adapter_id="law", weights_version="7")
    salt = b"\x04\0\0\0\0\0\0\0zo\xc3\xab"
    adapter = b"\x04\0\0\0\0\0\0\0=law"
    weights = b"\x01\0\0\0\0\0\0\x007"
    assert identity.root_key() == sha256(b"manta-kv-1", salt, adapter, weights)


def test_no_two_identities_share_a_root() -> None:
    identities = [
        CacheIdentity(),
        CacheIdentity(salt="a"),
        CacheIdentity(adapter_id="a"),
        CacheIdentity(adapter_id=""),
        CacheIdentity(weights_version="a"),
        CacheIdentity(salt="=a"),
        CacheIdentity(salt="ab"),
        CacheIdentity(salt="a", weights_version="b"),
        CacheIdentity(salt="a", adapter_id="b"),
    ]
    assert len({identity.root_key() for identity in identities}) == len(identities)


def test_block_key_is_the_hash_of_parent_tokens_and_extra() -> None:
    parent = bytes(range(32))
    assert block_key(parent, [5, 70_000, 1]) == sha256(parent, ids(5, 70_000, 1))
    assert block_key(parent, (5, 70_000, 1), extra=b"image") == sha256(parent, ids(5, 70_000, 1), b"image")


def test_block_keys_are_a_chain_from_the_root_over_the_full_blocks() -> None:
    first = sha256(ROOT, ids(1, 2, 3))
    second = sha256(first, ids(4, 5, 6))
    assert block_keys(CacheIdentity(), [1, 2, 3, 4, 5, 6, 7, 8], 3) == [first, second]
    salted = sha256(b"manta-kv-1", b"\x01" + bytes(7) + b"s", EMPTY_FIELD, EMPTY_FIELD)
    assert block_keys(CacheIdentity(salt="s"), [1, 2, 3], 3) == [sha256(salted, ids(1, 2, 3))]


@pytest.mark.parametrize(("num_tokens", "num_keys"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_partial_last_block_has_no_key(num_tokens: int, num_keys: int) -> None:
    assert len(block_keys(CacheIdentity(), list(range(num_tokens)), 4)) == num_keys


def test_equal_block_after_another_beginning_has_another_key() -> None:
    one, other = (block_keys(CacheIdentity(), [first, 2, 8, 9], 2) for first in (1, 3))
    assert one[0] != other[0]
    assert one[1] != other[1]
