from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet.bookings import Booking, PendingPrefixes
from router.snapshot import RoutingRequest


def chained(blocks: list[int]) -> tuple[bytes, ...]:
    """Keys as the hash chain makes them: each names all blocks up to it."""
    return tuple(bytes(blocks[: position + 1]) for position in range(len(blocks)))


def booking(request_id: str, replica_id: str, blocks: list[int]) -> Booking:
    request = RoutingRequest(request_id=request_id, model="m", num_prompt_tokens=1, max_tokens=1, block_keys=chained(blocks))
    return Booking(
        request=request, replica_id=replica_id, epoch=1, booked_s=0.0, num_uncached_tokens=1, num_context_tokens=1, num_charged_tokens=0
    )


def common(a: list[int], b: list[int]) -> int:
    return next((position for position, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


BLOCKS = st.lists(st.integers(0, 1), max_size=12)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), BLOCKS, st.booleans()), max_size=12), BLOCKS)
def test_pending_prefixes_equal_the_longest_common_prefix(entries: list[tuple[int, list[int], bool]], asked: list[int]) -> None:
    pending = PendingPrefixes()
    kept: dict[str, int] = {}
    for number, (replica, blocks, is_removed) in enumerate(entries):
        made = booking(f"q{number}", f"r{replica}", blocks)
        pending.add(made)
        if is_removed:
            pending.remove(made)
            pending.remove(made)
        elif common(blocks, asked):
            kept[f"r{replica}"] = max(kept.get(f"r{replica}", 0), common(blocks, asked))
    assert pending.match(chained(asked)) == kept
    if all(is_removed for _, _, is_removed in entries):
        assert pending.num_entries == 0
