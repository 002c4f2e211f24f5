"""All bookings of one model, and the prefixes that they will have cached soon."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

from kvcache.hashing import BlockKey
from router.fleet.bookings import Booking, PendingPrefixes
from router.fleet.prefix_index import PrefixIndex
from router.fleet.replica_state import ReplicaState
from router.snapshot import RoutingRequest


class BookingLedger:
    """Owns which replica, or which two, each dispatched request is booked on.

    A request has one booking on the replica where it runs. A request that a pair serves has a second one on the replica that computes
    its prompt. The second may end earlier (`take_prefill`) or, when the other replica dies, last longer.
    """

    def __init__(self) -> None:
        self._running: OrderedDict[str, Booking] = OrderedDict()  # request id -> booking, oldest first
        self._prefills: OrderedDict[str, Booking] = OrderedDict()  # request id -> booking on a pair's prefill replica, oldest first
        self._pending = PendingPrefixes()
        self._pending_on: dict[str, dict[str, Booking]] = {}  # replica id -> request id -> booking whose blocks are not reported

    def __len__(self) -> int:
        """Number of requests booked where they run."""
        return len(self._running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running or request_id in self._prefills

    @property
    def num_prefills(self) -> int:
        """Number of pairs whose prompt is still in the prefill pool."""
        return len(self._prefills)

    @property
    def num_pending_entries(self) -> int:
        return self._pending.num_entries

    @property
    def requests(self) -> Iterator[RoutingRequest]:
        """Every booked request once."""
        yield from (booking.request for booking in self._running.values())
        yield from (booking.request for request_id, booking in self._prefills.items() if request_id not in self._running)

    def book(
        self, request: RoutingRequest, places: tuple[ReplicaState, ...], num_uncached_tokens: int, num_output_tokens: int, now_s: float
    ) -> None:
        """Books a request without a booking on its replica, or on both replicas of a pair, of which the first computes the prompt.

        The first booking of a pair counts the tokens to compute and the prompt's context; the second counts the whole context and the
        slot, from the predicted arrival of the first KV.
        """
        runs = Booking(
            request=request,
            replica_id=places[-1].replica_id,
            epoch=places[-1].epoch,
            booked_s=now_s,
            num_uncached_tokens=num_uncached_tokens,
            num_context_tokens=request.num_prompt_tokens + num_output_tokens,
            num_charged_tokens=num_output_tokens,
            arrives_s=now_s,
        )
        if len(places) > 1:
            prefill = replace(
                runs,
                replica_id=places[0].replica_id,
                epoch=places[0].epoch,
                num_context_tokens=request.num_prompt_tokens,
                num_charged_tokens=0,
            )
            self._add(self._prefills, prefill, places[0], now_s)
            runs = replace(runs, num_uncached_tokens=0, arrives_s=prefill.start_s)
        self._add(self._running, runs, places[-1], now_s)

    def take(self, request_id: str) -> Booking | None:
        """Ends the booking where the request runs."""
        return self._take(self._running, request_id)

    def take_prefill(self, request_id: str) -> Booking | None:
        """Ends the booking where a pair computes its prompt."""
        return self._take(self._prefills, request_id)

    def drop_replica(self, replica_id: str) -> None:
        """Ends every booking on a replica that is gone. A pair's other booking stays until it is taken."""
        for bookings in (self._running, self._prefills):
            for request_id in [request_id for request_id, booking in bookings.items() if booking.replica_id == replica_id]:
                self._take(bookings, request_id)

    def booked_before(self, booked_s: float) -> list[str]:
        """Ids of requests booked at `booked_s` or earlier."""
        found: dict[str, None] = {}
        for bookings in (self._running, self._prefills):
            for request_id, booking in bookings.items():
                if booking.booked_s > booked_s:
                    break
                found[request_id] = None
        return list(found)

    def postpone(self, now_s: float) -> None:
        """Moves predicted arrivals that have passed to now, for pairs that are still in prefill: they have not reached the replica yet."""
        for request_id in self._prefills:
            booking = self._running.get(request_id)
            if booking is not None and booking.arrives_s < now_s:
                booking.arrives_s = now_s

    def match_pending(self, keys: tuple[BlockKey, ...]) -> dict[str, int]:
        """Leading blocks of `keys` that bookings on each replica share; replicas without any are left out."""
        return self._pending.match(keys)

    def confirm(self, replica_id: str, index: PrefixIndex) -> None:
        """Removes bookings on a replica from the pending prefixes once the index has their last block."""
        waiting = self._pending_on.get(replica_id, {})
        for booking in [b for b in waiting.values() if index.holds(replica_id, b.request.block_keys[-1])]:
            self.forget_prefix(booking)

    def forget_prefix(self, booking: Booking) -> None:
        """Removes a booking from the pending prefixes; a booking without a pending prefix is ignored."""
        on_replica = self._pending_on.get(booking.replica_id)
        if on_replica is not None and on_replica.pop(booking.request.request_id, None) is not None:
            self._pending.remove(booking)
            if not on_replica:
                del self._pending_on[booking.replica_id]

    def _add(self, bookings: dict[str, Booking], booking: Booking, replica: ReplicaState, now_s: float) -> None:
        replica.book(booking, now_s)
        bookings[booking.request.request_id] = booking
        if booking.request.block_keys:
            self._pending.add(booking)
            self._pending_on.setdefault(booking.replica_id, {})[booking.request.request_id] = booking

    def _take(self, bookings: dict[str, Booking], request_id: str) -> Booking | None:
        booking = bookings.pop(request_id, None)
        if booking is not None:
            self.forget_prefix(booking)
        return booking
