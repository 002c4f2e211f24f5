"""The offer of one request's KV to another replica: its content, its location and its lease. Free of torch."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.hashing import CacheIdentity


class HandoffFailed(RuntimeError):
    """The KV of a handoff is unavailable; the message says why. Recomputing it is always correct.

    Not raised for blocks that are only late: a pull waits for those.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShare:
    """The KV heads `first .. end - 1` of every layer, held by the rank whose transfer server is at `address`."""

    first: int
    end: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KVHandoff:
    """One request's KV, leased to the first receiver that pulls it. Blocks become readable as the prefill proceeds."""

    fingerprint: str
    """Names model, weights and kind of KV; a receiver with another fingerprint rejects the handoff."""
    layout_id: str
    """Layout of the source's memory; bytes move unconverted where the receiver's is equal."""
    block_size: int
    dtype: str
    num_tokens: int
    """Number of tokens whose KV is handed over: all before the first generated one."""
    tokens_digest: str
    """Digest of these tokens and their cache identity, so that a receiver never takes the KV of another text."""
    layers: tuple[int, int]
    """First layer and the one after the last."""
    block_ids: tuple[int, ...]
    """Block ids of the source, for its logs; receivers ask for positions in this table."""
    epoch: int
    lease: int
    lease_s: float
    """Time from the last renewal to the end of the lease; every message of a receiver renews it."""
    shares: tuple[HeadShare, ...]
    """One per rank of the source; together they cover all heads, and some heads may be in two shares."""


def tokens_digest(identity: CacheIdentity, token_ids: Sequence[int]) -> str:
    return hashlib.sha256(identity.root_key() + array("q", token_ids).tobytes()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSlice:
    """Heads to pull from one share: `source` and `target` are (first, end) among the source rank's and the receiver's heads."""

    share: int
    source: tuple[int, int]
    target: tuple[int, int]


def plan_heads(shares: Sequence[HeadShare], first: int, end: int) -> tuple[HeadSlice, ...]:
    """The heads that a rank with heads `first .. end - 1` pulls from each share, each head once.

    Source and receiver may differ in tensor_parallel_size. Raises ValueError when no share has a head.
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
