"""Computes the hit rates of two simple policies on a Mooncake trace, with a model that shares no code with the router.

Each replica is an LRU list of hash ids, and there is no time: each request counts its leading ids in the list, then touches all its ids
from last to first and evicts down to the limit. Round robin takes replicas in turn; longest prefix takes the replica with the longest
match among those with at most `cap` times the mean work so far, else the one with the least work.
On the full public traces this gives .121/.183 and .231/.365 (round robin), .284/.357 and .561/.632 (longest prefix).

    python -m tests.bench.router_reference_cache TRACE.jsonl
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from pathlib import Path


class LruCache:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.ids: OrderedDict[int, None] = OrderedDict()

    def depth(self, hash_ids: list[int]) -> int:
        return next((depth for depth, hash_id in enumerate(hash_ids) if hash_id not in self.ids), len(hash_ids))

    def touch(self, hash_ids: list[int]) -> None:
        for hash_id in reversed(hash_ids):
            self.ids[hash_id] = None
            self.ids.move_to_end(hash_id)
        while len(self.ids) > self.limit:
            self.ids.popitem(last=False)


def hit_rate(rows: list[list[int]], limit: int, policy: str, num_replicas: int = 4, cap: float = 1.01) -> tuple[float, float]:
    """(share of blocks found, work of the busiest replica over the mean)."""
    caches = [LruCache(limit) for _ in range(num_replicas)]
    work = [0] * num_replicas
    num_found = num_blocks = 0
    for number, hash_ids in enumerate(rows):
        if policy == "round_robin":
            chosen = number % num_replicas
        else:
            bound = cap * sum(work) / num_replicas
            allowed = [replica for replica in range(num_replicas) if work[replica] <= bound]
            chosen = max(allowed, key=lambda replica: (caches[replica].depth(hash_ids), -work[replica]))
            if caches[chosen].depth(hash_ids) <= 1:
                chosen = min(allowed, key=work.__getitem__)
        found = caches[chosen].depth(hash_ids)
        caches[chosen].touch(hash_ids)
        work[chosen] += len(hash_ids) - found
        num_found += found
        num_blocks += len(hash_ids)
    return num_found / num_blocks, max(work) * num_replicas / sum(work)


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        rows = [json.loads(line)["hash_ids"] for line in path.open()]
        for policy in ("round_robin", "longest_prefix"):
            for limit in (5_000, 20_000):
                found, busiest = hit_rate(rows, limit, policy)
                print(f"{path.stem} {policy} {limit} blocks a replica: hit rate {found:.3f}, busiest {busiest:.3f}x the mean")


if __name__ == "__main__":
    main()
