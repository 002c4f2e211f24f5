"""The offer of one request's KV to another replica: what it is, where it lies, and until when. Free of torch."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.hashing import CacheIdentity


class HandoffFailed(RuntimeError):
    """The KV of a handoff cannot be had; the message says why. Recomputing it is always right.

    Not raised for blocks that are only late: a pull waits for those.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShare:
    """The KV heads `first .. end - 1` of every layer, held by one rank that answers at `address`."""

    first: int
    end: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KVHandoff:
    """One request's KV, leased to whoever pulls it first. Blocks become readable as the prefill goes on."""

    fingerprint: str
    """Names model, weights and the kind of KV; equal or the handoff is refused."""
    layout_id: str
    """Layout of the source's memory: where the receiver's is equal, bytes move as they are."""
    block_size: int
    dtype: str
    num_tokens: int
    """Tokens whose KV is handed over: all that came before the first generated one."""
    tokens_digest: str
    """Of those tokens and their cache identity, so that a receiver never takes the KV of another text."""
    layers: tuple[int, int]
    """First layer and the one after the last."""
    block_ids: tuple[int, ...]
    """The source's own, for its logs: a receiver asks for positions in this table."""
    epoch: int
    lease: int
    lease_s: float
    """The lease ends this long after it was last renewed; every message of a receiver renews it."""
    shares: tuple[HeadShare, ...]
    """One for each rank of the source; together they cover all heads, some of them perhaps twice."""


def tokens_digest(identity: CacheIdentity, token_ids: Sequence[int]) -> str:
    return hashlib.sha256(identity.root_key() + array("q", token_ids).tobytes()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSlice:
    """Heads to bring from one share, as positions among the source rank's heads and among the receiver's."""

    share: int
    source: tuple[int, int]
    target: tuple[int, int]


def plan_heads(shares: Sequence[HeadShare], first: int, end: int) -> tuple[HeadSlice, ...]:
    """Which heads a rank that holds `first .. end - 1` brings from which share, each head once.

    So any tensor_parallel_size of the source serves any of the receiver. Raises ValueError when a head is nowhere.
    """
    slices: list[HeadSlice] = []
    head = first
    while head < end:
        index = max((i for i, s in enumerate(shares) if s.first <= head < s.end), key=lambda i: shares[i].end, default=None)
        if index is None:
            raise ValueError(f"no share of the handoff holds KV head {head}")
        share = shares[index]
        stop = min(share.end, end)
        slices.append(HeadSlice(share=index, source=(head - share.first, stop - share.first), target=(head - first, stop - first)))
        head = stop
    return tuple(slices)
