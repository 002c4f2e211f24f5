"""The cost, in seconds, of serving a request on one replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.snapshot import RECENT_WORK_S, CandidateScore, ReplicaSnapshot, RoutingRequest

_COLD_BALANCE = 0.03
_MAX_UTILIZATION = 0.9
_BUSY_UTILIZATION = 0.25

_TERMS = ("wait", "prefill", "pending", "capacity", "queueing", "slowdown", "eviction", "decode", "balance")
_TERMS_IN_TIME = (*_TERMS, "overdue")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringWeights:
    """Weight of a second of each kind. Weight 1 is a second of this request's own time to first token."""

    capacity: float = 16.0
    """A second of prefill at the replicas' mean rate, once they are busy a quarter of the time: work done twice is capacity that the
    next burst lacks, and the mean load of the last minutes does not show bursts. The weight falls in proportion to the load below
    that: idle replicas have room for a burst, so no request should wait to save their capacity."""
    slowdown: float = 0.25
    """A second of prefill, per request that decodes on the replica: chunked prefill stretches its steps, so every answer there takes
    that much longer (each second weighted as in `decode`)."""
    queueing: float = 4.0
    """A second of prefill, per second that it delays requests that arrive while the replica is busy: utilization /
    (1 - utilization) of them with random arrivals, and several times that with arrivals as bursty as real ones."""
    eviction: float = 2.0
    """A second of recomputing the blocks that the new ones evict, and the blocks that these evict in turn."""
    pending: float = 0.9
    """A second of prefill that booked but not yet reported blocks are expected to save."""
    decode: float = 0.25
    """A second by which the answer takes longer because of the replica's decode step."""
    interference: float = 4.0
    """A second by which prefill in the decode pool stretches steps, per request that decodes there: the pool exists so that nothing
    delays answers. At 0.25, as in `slowdown`, half of the long prompts were computed there under load."""
    misplaced: float = 1.0
    """A second of an answer that is decoded in the prefill pool, where later prompts delay it. Only with pools."""
    balance: float = 0.1
    """A second of recent work on the replica beyond the candidates' least plus `tolerance`."""
    tolerance: float = 0.04
    """Share by which recent work may differ before affinity yields to it; below, it only decides where cold prompts go."""
    overdue: float = 1.0
    """A second by which the first token is predicted to miss its deadline, in addition to the wait itself."""
    miss_s: float = 20.0
    """Fixed cost of missing a deadline by any amount, so that affinity does not outweigh a miss when another replica is in time."""


class PoolPrices(NamedTuple):
    """The cost of work in one pool at one moment, equal for all its replicas."""

    least_work_s: float
    """Recent work of the replica with the least."""
    num_behind: float
    """Seconds of delay for requests that arrive while a replica is busy, per second of its work."""
    token_s: float
    """Cost in seconds of the capacity that one computed token takes."""


class ReplicaCosts:
    """Cost = wait + prefill of uncached tokens + capacity + queueing + slow-down of others + eviction + decode + imbalance."""

    def __init__(self, weights: ScoringWeights, *, expected_output_tokens: int, default_ttft_slo_s: float) -> None:
        self.weights = weights
        self._expected_output_tokens = expected_output_tokens
        self._default_ttft_slo_s = default_ttft_slo_s

    def prices(self, replicas: Sequence[ReplicaSnapshot]) -> PoolPrices:
        work_s = [replica.recent_work_s for replica in replicas]
        utilization = min(_MAX_UTILIZATION, sum(work_s) / len(work_s) / RECENT_WORK_S)
        mean_rate = sum([replica.stats.prefill_tokens_per_s or 1.0 for replica in replicas]) / len(replicas)
        return PoolPrices(
            least_work_s=min(work_s),
            num_behind=self.weights.queueing * utilization / (1 - utilization),
            token_s=self.weights.capacity * min(1.0, utilization / _BUSY_UTILIZATION) / mean_rate,
        )

    def num_outputs(self, request: RoutingRequest) -> int:
        return min(request.max_tokens, self._expected_output_tokens * request.num_choices)

    def due_s(self, request: RoutingRequest) -> float | None:
        """When the first token is due; None for a request with neither a deadline nor an arrival time, and for a resend without a
        deadline, whose first token may be out: it is not late."""
        if request.deadline_s is None and request.arrival_s and not request.attempt:
            return request.arrival_s + self._default_ttft_slo_s
        return request.deadline_s

    def score(
        self,
        request: RoutingRequest,
        replica: ReplicaSnapshot,
        now_s: float,
        num_outputs: int,
        prices: PoolPrices,
        due_s: float | None,
    ) -> CandidateScore:
        """The cost of the whole request on this replica; with `num_outputs` 0, of computing its prompt."""
        # Runs for each candidate of each decision. Plain comparisons, because calls of min and max would take half of its time;
        # tuples unpacked at once, because reading a field by name takes ten times as long.
        weights = self.weights
        least_work_s, num_behind, token_s = prices
        replica_id, stats, _, size, num_cached_blocks, num_pending_blocks, _, _, _, recent_work_s, recent_work_scale, _, _, behind = replica
        num_running, _, _, _, num_blocks, num_free_blocks, num_findable_blocks, rate_or_none, step_or_none, _, _ = stats
        if behind is not None:  # but all that decode there, also those that step aside, are slowed down by the prompt
            rate_or_none = replica.without_behind.stats.prefill_tokens_per_s
        rate, step_s = rate_or_none or 1.0, step_or_none or 0.0
        num_cached = num_cached_blocks * size
        num_uncached = request.num_prompt_tokens - num_cached
        if num_uncached < 1:
            num_uncached = 1
        num_pending = num_pending_blocks * size - num_cached
        num_pending = 0 if num_pending <= 0 else num_pending if num_pending < num_uncached else num_uncached - 1
        wait_s = self.wait_s(request, replica, num_uncached, num_outputs)
        prefill_s = num_uncached / rate
        pending_weight = weights.pending
        pending_s = -pending_weight * num_pending / rate if num_pending else 0.0
        computed_s = prefill_s + pending_s
        # blocks that are neither held nor findable are taken first; further ones evict
        num_blank_blocks = num_blocks - num_findable_blocks
        if num_blank_blocks > num_free_blocks:
            num_blank_blocks = num_free_blocks
        num_evicted_blocks = (num_uncached - num_pending + num_outputs) / size - (num_blank_blocks if num_blank_blocks > 0 else 0)
        eviction_s = weights.eviction * num_evicted_blocks * size / rate if num_evicted_blocks > 0 else 0.0
        capacity_s = token_s * (num_uncached - pending_weight * num_pending)
        queueing_s = num_behind * computed_s
        slowdown_s = weights.slowdown * num_running * computed_s
        decode_s = weights.decode * num_outputs * step_s
        # The extrapolated work of a single prompt is noise, and large in a replica's first minutes: subtract it.
        ahead_s = recent_work_s - least_work_s - (recent_work_scale - 1.0) * request.num_prompt_tokens / rate
        if ahead_s < 0:
            ahead_s = 0.0
        beyond_s = ahead_s - weights.tolerance * least_work_s
        balance_s = _COLD_BALANCE * ahead_s + (weights.balance * beyond_s if beyond_s > 0 else 0.0)
        cost = wait_s + prefill_s + pending_s + capacity_s + queueing_s + slowdown_s + eviction_s + decode_s + balance_s
        seconds = (wait_s, prefill_s, pending_s, capacity_s, queueing_s, slowdown_s, eviction_s, decode_s, balance_s)
        if due_s is None:
            return CandidateScore(replica_id, cost, _TERMS, seconds)
        late_s = now_s + wait_s + computed_s - due_s
        overdue_s = weights.miss_s + weights.overdue * late_s if late_s > 0 else 0.0
        return CandidateScore(replica_id, cost + overdue_s, _TERMS_IN_TIME, (*seconds, overdue_s))

    def wait_s(self, request: RoutingRequest, replica: ReplicaSnapshot, num_uncached: int, num_outputs: int) -> float:
        """Seconds of prefill queued before this request; or, if longer, the time until a slot and enough blocks are free.

        Little's law gives the latter: everything held now leaves within the duration of one answer.
        """
        if replica.behind is not None:
            replica = replica.without_behind
        _, stats, max_num_seqs, size, _, _, num_booked, num_booked_prefill, num_booked_context, _, _, report_age_s, _, _ = replica
        num_running, num_waiting, num_uncomputed, _, num_blocks, num_free_blocks, _, rate_or_none, step_or_none, _, _ = stats
        rate = rate_or_none or 1.0
        wait_s = num_uncomputed / rate - report_age_s
        wait_s = num_booked_prefill / rate + (wait_s if wait_s > 0 else 0.0)
        num_too_many = num_running + num_waiting + num_booked + request.num_choices - max_num_seqs
        num_needed_blocks = (num_uncached + num_outputs + num_booked_context) / size
        num_missing_blocks = num_needed_blocks - num_free_blocks if num_blocks else 0
        if num_too_many > 0 or num_missing_blocks > 0:
            answer_s = self._expected_output_tokens * (step_or_none or 0.0)
            num_held_blocks = max(1, num_blocks - num_free_blocks)
            wait_s = max(wait_s, num_too_many * answer_s / max_num_seqs, num_missing_blocks * answer_s / num_held_blocks)
        return wait_s
