"""Decisions that reports do not show yet: bookings, and the prefixes that they will have cached soon."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.hashing import BlockKey
from router.snapshot import RoutingRequest


@dataclass(slots=True)
class Booking:
    """One dispatched request on one replica, from the decision until its release there. Owned by one `ReplicaState`."""

    request: RoutingRequest
    replica_id: str
    epoch: int
    booked_s: float
    num_uncached_tokens: int
    """Prompt tokens to compute, at least 1; 0 when the KV comes from a replica of the prefill pool."""
    num_context_tokens: int
    """Tokens of prompt and expected output, all choices; only the prompt on the prefill replica of a pair."""
    num_charged_tokens: int
    """Output tokens that the tenant was charged for at dispatch; `release` settles the difference."""
    arrives_s: float = 0.0
    """Predicted arrival at the replica: with the decision, or with the first KV from another replica."""
    start_s: float = 0.0
    """Predicted start of the prefill."""
    num_unseen: int = 0
    """Choices that no report has counted yet."""
    is_released: bool = False


class PendingPrefixes:
    """Owns the prompts of bookings whose blocks no report has shown yet, and finds prefixes that a prompt shares with them.

    Keys are chained, so two prompts agree up to position i exactly when their i-th keys are equal. Each booking is entered only at the
    positions 1, 2, 4, 8, ...; a lookup takes the deepest entry that matches and bisects from there. So a booking takes
    O(log blocks) entries instead of one per block.
    """

    def __init__(self) -> None:
        # key at an anchor position -> bookings with that key, as (request id, replica id) -> booking
        self._anchors: dict[BlockKey, dict[tuple[str, str], Booking]] = {}

    @property
    def num_entries(self) -> int:
        return sum(map(len, self._anchors.values()))

    def add(self, booking: Booking) -> None:
        name = booking.request.request_id, booking.replica_id
        anchors, keys = self._anchors, booking.request.block_keys
        for position in _anchor_positions(len(keys)):
            bookings = anchors.get(keys[position - 1])
            if bookings is None:
                anchors[keys[position - 1]] = {name: booking}
            else:
                bookings[name] = booking

    def remove(self, booking: Booking) -> None:
        """Forgets a booking; an unknown one is ignored."""
        name = booking.request.request_id, booking.replica_id
        for position in _anchor_positions(len(booking.request.block_keys)):
            key = booking.request.block_keys[position - 1]
            bookings = self._anchors.get(key)
            if bookings is not None and bookings.get(name) is booking:
                del bookings[name]
                if not bookings:
                    del self._anchors[key]

    def match(self, keys: tuple[BlockKey, ...]) -> dict[str, int]:
        """Leading blocks of `keys` that bookings on each replica share; replicas without any are left out."""
        depths: dict[str, int] = {}
        found: list[tuple[int, dict[tuple[str, str], Booking]]] = []  # anchors that some booking shares
        upper = len(keys)
        for position in _anchor_positions(len(keys)):
            bookings = self._anchors.get(keys[position - 1])
            if bookings is None:
                upper = position - 1
                break
            found.append((position, bookings))
        num_measured = 0
        for position, bookings in reversed(found):
            if len(bookings) > num_measured:  # else they are the bookings of the anchor after it
                num_measured = len(bookings)
                for booking in bookings.values():
                    if depths.get(booking.replica_id, 0) < upper:
                        depth = _common_prefix(keys, booking.request.block_keys, position, upper)
                        if depth > depths.get(booking.replica_id, 0):
                            depths[booking.replica_id] = depth
            # bookings that share this anchor are measured; the others differ, or end, before it
            upper = position - 1
        return depths


_POWERS = tuple(tuple(1 << exponent for exponent in range(num_bits)) for num_bits in range(64))


def _anchor_positions(length: int) -> tuple[int, ...]:
    """The powers of two up to `length`."""
    return _POWERS[length.bit_length()]


def _common_prefix(a: tuple[BlockKey, ...], b: tuple[BlockKey, ...], known: int, limit: int) -> int:
    """Length of the common prefix, which is at least `known` and at most `limit`."""
    low, high = known, min(limit, len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
