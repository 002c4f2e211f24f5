"""The plain part of a handoff: which heads come from where, and whose tokens it is about."""

import pytest

from kvcache.handoff import HeadShare, HeadSlice, plan_heads, tokens_digest
from kvcache.hashing import CacheIdentity


def _shares(*ranges: tuple[int, int]) -> list[HeadShare]:
    return [HeadShare(first=first, end=end, address=f"tcp://h:{first}") for first, end in ranges]


@pytest.mark.parametrize("num_sources", [1, 2, 3, 6])
@pytest.mark.parametrize("num_targets", [1, 2, 3, 6])
def test_plan_heads_for_any_two_sizes_brings_each_head_once(num_sources: int, num_targets: int) -> None:
    num_heads = 6
    size = num_heads // num_sources
    shares = _shares(*((i * size, (i + 1) * size) for i in range(num_sources)))
    for rank in range(num_targets):
        first, end = rank * num_heads // num_targets, (rank + 1) * num_heads // num_targets
        found = []
        for one in plan_heads(shares, first, end):
            heads = [shares[one.share].first + h for h in range(*one.source)]
            assert [first + h for h in range(*one.target)] == heads
            found += heads
        assert found == list(range(first, end))


def test_plan_heads_of_a_replicated_head_takes_one_of_its_holders() -> None:
    assert plan_heads(_shares((0, 1), (0, 1)), 0, 1) == (HeadSlice(share=0, source=(0, 1), target=(0, 1)),)


def test_plan_heads_with_a_gap_names_the_head() -> None:
    with pytest.raises(ValueError, match="KV head 2"):
        plan_heads(_shares((0, 2), (3, 4)), 0, 4)


def test_tokens_digest_differs_by_tokens_and_by_identity() -> None:
    digests = {
        tokens_digest(CacheIdentity(), [1, 2]),
        tokens_digest(CacheIdentity(), [1, 3]),
        tokens_digest(CacheIdentity(salt="tenant"), [1, 2]),
        tokens_digest(CacheIdentity(weights_version="2"), [1, 2]),
    }
    assert len(digests) == 4
    assert tokens_digest(CacheIdentity(), [1, 2]) in digests
