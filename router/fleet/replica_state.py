"""The router's knowledge of one replica: its last report, its bookings, and predictions from both."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import exp, inf

from replicas.stats import ReplicaReport, ReplicaStats
from router.fleet.bookings import Booking
from router.fleet.rates import Rates
from router.snapshot import RECENT_WORK_S, LoadBehind, ReplicaLoad, ReplicaSnapshot

_SNAPSHOT_AGE_S = 0.1
_LEAST_KNOWN_S = 30.0
_NOTHING = LoadBehind()
_PREVIEW_BALANCE = 0.03
_PREVIEW_CROWDING_STEPS = 64.0
"""Cost of a full decode replica in the first estimate, in decode steps: a quarter of an answer of 256 tokens."""


class ReplicaState:
    """Owns a replica's last report and the bookings since, and predicts its queue between reports.

    The engine's count of accepted requests shows which bookings a report has seen: running, waiting and ended requests add up to all
    that ever arrived, and they arrive in about the order of booking. Until then a booking counts as load in addition to the report.
    Between reports, prefill is assumed to proceed at the measured rate, in the order of dispatch.
    """

    def __init__(self, report: ReplicaReport, now_s: float, rates: Rates) -> None:
        self.replica_id = report.replica_id
        self.role = report.role
        self.epoch = report.epoch
        self.max_num_seqs = report.max_num_seqs
        self.block_size = report.block_size
        self.is_draining = report.is_draining
        self.is_fenced = False  # presumed hung
        self.callers = report.callers
        self.stats = report.stats
        self.rates = rates
        self.reported_s = now_s
        self.held_tokens = 0  # prompt tokens of requests that wait in the router for this replica, in the current step
        self._unseen: deque[Booking] = deque()  # bookings that no report has counted, in order of arrival
        self._num_unseen = 0  # choices in `_unseen`, without released ones
        self._unseen_prefill_tokens = 0
        self._unseen_context_tokens = 0
        self._unseen_by_priority: dict[int, list[int]] = {}  # the three counts above, without zeros
        self._num_accepted = _num_accepted(report.stats)
        self._num_released = 0  # choices that the last report counted and that ended since
        self._released_context_tokens = 0
        self.preview_s = 0.0  # cost of recent work and load at the last booking or report; for the first estimate only
        self.busy_until_s = now_s + report.stats.num_uncomputed_tokens / rates.prefill_tokens_per_s
        self._recent_work_s = 0.0
        self._recent_at_s = now_s
        self._known_since_s = now_s
        self._stats_now: ReplicaLoad | None = None  # see `_current_stats`
        self._snapshot: ReplicaSnapshot | None = None
        self._snapshot_at_s = 0.0

    @property
    def num_unseen(self) -> int:
        """Requests that no report has counted yet."""
        return self._num_unseen

    @property
    def num_present(self) -> int:
        """Requests on the replica as far as known: reported ones and those on their way."""
        return self.stats.num_running + self.stats.num_waiting + self._num_unseen

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.rates.prefill_tokens_per_s

    def apply_report(self, report: ReplicaReport, now_s: float, rates: Rates) -> None:
        """Applies a newer report of the same epoch; older ones (fewer steps) change nothing."""
        if report.stats.num_steps < self.stats.num_steps:
            return
        self.stats = report.stats
        self.rates = rates
        self.reported_s = now_s
        self.callers = report.callers
        self.is_draining = report.is_draining
        self.max_num_seqs = report.max_num_seqs
        self._num_released = self._released_context_tokens = 0
        accepted = _num_accepted(report.stats)
        self._see(accepted - self._num_accepted)
        self._num_accepted = accepted
        start_s = now_s + report.stats.num_uncomputed_tokens / rates.prefill_tokens_per_s
        for booking in self._unseen:
            if booking.num_uncached_tokens:
                booking.start_s = self._start_s(booking, start_s, now_s)
                if not booking.is_released:
                    start_s += booking.num_uncached_tokens / rates.prefill_tokens_per_s
        self.busy_until_s = start_s
        self.preview_s = self._estimate_s(now_s)
        self._stats_now = self._snapshot = None

    def book(self, booking: Booking, now_s: float) -> None:
        work_s = booking.num_uncached_tokens / self.rates.prefill_tokens_per_s
        booking.num_unseen = booking.request.num_choices
        if booking.num_uncached_tokens:
            booking.start_s = self._start_s(booking, self.busy_until_s, now_s)
            self.busy_until_s = max(now_s, self.busy_until_s) + work_s
        else:
            booking.start_s = now_s  # without a prefill here it does not wait for others
        self._line_up(booking)
        self._count(booking, 1)
        self._recent_work_s = self._decayed_work_s(now_s) + work_s
        self._recent_at_s = now_s
        self.preview_s = self._estimate_s(now_s)
        self._snapshot = None

    def release(self, booking: Booking) -> None:
        """Ends a booking. An unseen one stays in line without weight, because a later report may still count it."""
        booking.is_released = True
        if booking.num_unseen:
            self._count(booking, -1, booking.num_unseen)
        self._num_released += booking.request.num_choices - booking.num_unseen
        self._released_context_tokens += booking.num_context_tokens if not booking.num_unseen else 0
        self._stats_now = self._snapshot = None

    def expire(self, now_s: float, expiry_s: float) -> list[Booking]:
        """Drops bookings that reports should have shown by now; returns those that were not released."""
        limit_s = min(now_s, self.reported_s) - expiry_s
        overdue = [booking for booking in self._unseen if max(booking.booked_s, booking.arrives_s) <= limit_s]
        if not overdue:
            return []
        self._unseen = deque(booking for booking in self._unseen if max(booking.booked_s, booking.arrives_s) > limit_s)
        lost = [booking for booking in overdue if not booking.is_released]
        for booking in lost:
            self._count(booking, -1, booking.num_unseen)
        for booking in overdue:
            booking.num_unseen = 0
        self._snapshot = None
        return lost

    def num_waiting(self, now_s: float, priority: float = inf) -> int:
        """Requests of `priority` or more urgent that are predicted to wait inside the replica for their first prefill token."""
        stats, behind = self.stats, self._behind(priority) or _NOTHING
        num_slots = self.max_num_seqs - stats.num_running + self._num_released + behind.num_running
        num_free_tokens = stats.num_free_blocks * self.block_size + self._released_context_tokens + behind.num_context_tokens
        num_present = stats.num_waiting + self._num_unseen - behind.num_waiting - behind.num_booked_requests
        num_unstarted = self._num_unstarted(now_s, priority, behind)
        if num_present > num_slots or (
            stats.num_blocks and self._unseen_context_tokens - behind.num_booked_context_tokens > num_free_tokens
        ):
            # slots or blocks are the bottleneck, so the prefill rate does not predict when requests start
            return max(num_present - max(0, num_slots), num_unstarted)
        return num_unstarted

    def next_start_s(self, now_s: float) -> float | None:
        """Predicted start of the next waiting request; None without a prediction."""
        starts = [booking.start_s for booking in self._unseen if booking.start_s > now_s and not booking.is_released]
        drain_s = self._drain_s(self.stats.num_uncomputed_tokens)
        if self.stats.num_waiting and drain_s > now_s - self.reported_s:
            step_s = drain_s / self.stats.num_waiting
            starts.append(now_s + max(0.001, step_s - (now_s - self.reported_s) % step_s))
        return min(starts, default=None)

    def wait_s(self, now_s: float) -> float:
        """Seconds of prefill queued here, held requests included. A first estimate; the policy makes its own."""
        return max(0.0, self.busy_until_s - now_s) + self.held_tokens / self.rates.prefill_tokens_per_s

    def recent_work_s(self, now_s: float) -> float:
        """Seconds of prefill sent here lately. For a replica known for less than the window it is extrapolated, because a new replica
        would otherwise look idle for minutes."""
        return self._decayed_work_s(now_s) * self._work_scale(now_s)

    def _work_scale(self, now_s: float) -> float:
        known_s = max(_LEAST_KNOWN_S, now_s - self._known_since_s)
        return 1 / (1 - exp(-known_s / RECENT_WORK_S))

    def _decayed_work_s(self, now_s: float) -> float:
        return self._recent_work_s * exp((self._recent_at_s - now_s) / RECENT_WORK_S)

    def snapshot(self, now_s: float, num_cached_blocks: int, num_pending_blocks: int, priority: float = inf) -> ReplicaSnapshot:
        """The policy's view for a request of `priority`. A snapshot without a prefix match and without less urgent load is reused for up
        to 0.1 s while nothing changes, because decisions ask for thousands."""
        behind = self._behind(priority)
        is_plain = not (num_cached_blocks or num_pending_blocks or self.held_tokens or behind)
        kept = self._snapshot
        if is_plain and kept is not None and 0 <= now_s - self._snapshot_at_s < _SNAPSHOT_AGE_S:
            return kept
        work_scale = self._work_scale(now_s)
        made = ReplicaSnapshot(  # by position, in the order of the fields: keywords take twice as long
            self.replica_id,
            self._current_stats(),
            self.max_num_seqs,
            self.block_size,
            num_cached_blocks,
            num_pending_blocks if num_pending_blocks > num_cached_blocks else num_cached_blocks,
            self._num_unseen,
            self._unseen_prefill_tokens + self.held_tokens,
            self._unseen_context_tokens,
            self._decayed_work_s(now_s) * work_scale,
            work_scale,
            now_s - self.reported_s,
            self.role,
            behind,
        )
        if is_plain:
            self._snapshot, self._snapshot_at_s = made, now_s
        return made

    def describe(self, now_s: float) -> dict[str, object]:
        """Plain JSON values for debugging."""
        stats = self.stats
        return {
            "role": self.role,
            "epoch": self.epoch,
            "is_draining": self.is_draining,
            "is_fenced": self.is_fenced,
            "callers": list(self.callers),
            "report_age_s": round(now_s - self.reported_s, 3),
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "num_uncomputed_tokens": stats.num_uncomputed_tokens,
            "num_blocks": stats.num_blocks,
            "num_free_blocks": stats.num_free_blocks,
            "num_booked_requests": self._num_unseen,
            "num_booked_prefill_tokens": self._unseen_prefill_tokens,
            "predicted_num_waiting": self.num_waiting(now_s),
            "predicted_wait_s": round(self.wait_s(now_s), 3),
            "recent_work_s": round(self.recent_work_s(now_s), 3),
            "prefill_tokens_per_s": round(self.rates.prefill_tokens_per_s, 1),
            "decode_step_s": round(self.rates.decode_step_s, 5),
            "transfer_tokens_per_s": round(self.rates.transfer_tokens_per_s, 1),
            "tokens_per_pass": {one.method: round(1 + one.num_accepted / one.num_passes, 2) for one in stats.drafts if one.num_passes},
            "speculation_gain": None if stats.speculation_gain is None else round(stats.speculation_gain, 3),
        }

    def _estimate_s(self, now_s: float) -> float:
        estimate_s = _PREVIEW_BALANCE * self.recent_work_s(now_s)
        if self.role == "decode":
            estimate_s += _PREVIEW_CROWDING_STEPS * self.rates.decode_step_s * self.num_present / self.max_num_seqs
        return estimate_s

    def _line_up(self, booking: Booking) -> None:
        """Inserts in order of predicted arrival: a request that waits for another replica's KV arrives later."""
        position = len(self._unseen)
        while position and self._unseen[position - 1].arrives_s > booking.arrives_s:
            position -= 1
        self._unseen.insert(position, booking)

    def _see(self, num_accepted: int) -> None:
        while num_accepted > 0 and self._unseen:
            booking = self._unseen[0]
            num_seen = min(num_accepted, booking.num_unseen)
            if not booking.is_released:
                self._count(booking, -1, num_seen)
            booking.num_unseen -= num_seen
            num_accepted -= num_seen
            if booking.num_unseen == 0:
                self._unseen.popleft()

    def _count(self, booking: Booking, sign: int, num_choices: int | None = None) -> None:
        """Adds a booking's load, or removes the load of `num_choices`; its prefill is removed with the last choice."""
        total = booking.request.num_choices
        num = total if num_choices is None else num_choices
        left = booking.num_unseen - num
        self._num_unseen += sign * num
        share = booking.num_context_tokens * booking.num_unseen // total - booking.num_context_tokens * left // total
        self._unseen_context_tokens += sign * share
        num_prefill = booking.num_uncached_tokens if left == 0 else 0
        self._unseen_prefill_tokens += sign * num_prefill
        counts = self._unseen_by_priority.setdefault(booking.request.priority, [0, 0, 0])
        for index, value in enumerate((num, num_prefill, share)):
            counts[index] += sign * value
        if not any(counts):
            del self._unseen_by_priority[booking.request.priority]

    def _num_unstarted(self, now_s: float, priority: float, behind: LoadBehind) -> int:
        num = sum(
            booking.num_unseen
            for booking in self._unseen
            if booking.start_s > now_s and not booking.is_released and booking.request.priority <= priority
        )
        num_waiting = self.stats.num_waiting - behind.num_waiting
        if num_waiting:
            drain_s = self._drain_s(self.stats.num_uncomputed_tokens - behind.num_uncomputed_tokens)
            left = 1.0 - (now_s - self.reported_s) / drain_s if drain_s > 0 else 1.0
            num += int(max(0.0, left) * num_waiting + 0.999)
        return num

    def _drain_s(self, num_tokens: int) -> float:
        return num_tokens / self.rates.prefill_tokens_per_s

    def _start_s(self, booking: Booking, queue_ends_s: float, now_s: float) -> float:
        """Predicted start of a booking's prefill behind a queue whose less urgent part waits for it."""
        behind = self._behind(booking.request.priority)
        if behind is not None:
            queue_ends_s -= self._drain_s(behind.num_uncomputed_tokens + behind.num_booked_prefill_tokens)
        return max(now_s, queue_ends_s)

    def _behind(self, priority: float) -> LoadBehind | None:
        """The part of the load that is less urgent than `priority`; None if there is none, as always without priorities."""
        tiers, unseen = self.stats.tiers, self._unseen_by_priority
        if not (tiers and tiers[-1].priority > priority) and not any(other > priority for other in unseen):
            return None
        reported = [tier[1:] for tier in tiers if tier.priority > priority]
        booked = [counts for other, counts in unseen.items() if other > priority]
        return LoadBehind(*_sums(reported, 4), *_sums(booked, 3))

    def _current_stats(self) -> ReplicaLoad:
        """The last report's load without requests that ended since, and with smoothed rates instead of measured ones."""
        if self._stats_now is not None:
            return self._stats_now
        stats = self.stats
        rates = self.rates
        self._stats_now = ReplicaLoad(  # by position, in the order of the fields: keywords take twice as long
            max(0, stats.num_running - self._num_released),
            stats.num_waiting,
            stats.num_uncomputed_tokens,
            max(0, stats.num_context_tokens - self._released_context_tokens),
            stats.num_blocks,
            stats.num_free_blocks,
            stats.num_cached_blocks,
            rates.prefill_tokens_per_s,
            rates.decode_step_s,
            rates.transfer_tokens_per_s,
            rates.urgent_tokens_per_s,
        )
        return self._stats_now


def _sums(rows: Sequence[Sequence[int]], num_columns: int) -> list[int]:
    return [sum(row[column] for row in rows) for column in range(num_columns)]


def _num_accepted(stats: ReplicaStats) -> int:
    return stats.num_running + stats.num_waiting + stats.num_finished + stats.num_cancelled + stats.num_failed
