"""Keys of KV blocks: a chain of SHA-256 hashes over token ids, so that equal keys mean equal prefixes."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

BlockKey = bytes
"""32 bytes that identify one full block together with everything before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheIdentity:
    """The properties, besides the tokens, that must be equal for two requests to share KV."""

    salt: str = ""
    adapter_id: str | None = None
    weights_version: str = ""

    def root_key(self) -> BlockKey:
        """The parent key of a sequence's first block. Fields are length-prefixed, so no two identities collide."""
        digest = hashlib.sha256(b"manta-kv-1")
        for part in (self.salt, "" if self.adapter_id is None else f"={self.adapter_id}", self.weights_version):
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
        return digest.digest()


def block_key(parent: BlockKey, token_ids: Sequence[int], extra: bytes = b"") -> BlockKey:
    """Key of the block with `token_ids` (exactly one full block) that follows `parent`.

    `extra` identifies other content of the block (the digest of an image); it is empty for text.
    """
    return hashlib.sha256(parent + array("q", token_ids).tobytes() + extra).digest()


def block_keys(identity: CacheIdentity, token_ids: Sequence[int], block_size: int) -> list[BlockKey]:
    """Keys of the full blocks of `token_ids`, in order; a partial last block has none."""
    keys: list[BlockKey] = []
    parent = identity.root_key()
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_key(parent, token_ids[start : start + block_size])
        keys.append(parent)
    return keys
