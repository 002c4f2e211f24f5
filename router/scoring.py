"""The router's own policy: every candidate costs so many seconds, and the cheapest gets the request."""

from __future__ import annotations

from dataclasses import dataclass

from router.policies import rendezvous_weight
from router.snapshot import RECENT_WORK_S, CandidateScore, ClusterSnapshot, Decision, ReplicaSnapshot, RoutingRequest

_COLD_BALANCE = 0.01
_MAX_UTILIZATION = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringWeights:
    """How much a second of each kind counts. 1 is a second of this request's own time to first token."""

    slowdown: float = 0.02
    """A second of prefill, for each request that decodes beside it (chunked prefill stretches their steps)."""
    queueing: float = 4.0
    """A second of prefill, for each second that it keeps those waiting who come while the replica is busy: utilization /
    (1 - utilization) of them with random arrivals, and several times that with arrivals as bursty as real ones."""
    eviction: float = 2.0
    """A second of recomputing what the new blocks push out of the cache, and later what is pushed out in turn."""
    pending: float = 0.9
    """A second of prefill that blocks booked but not reported yet are expected to save."""
    decode: float = 0.25
    """A second that the answer takes longer because the replica's decode step is slower."""
    balance: float = 0.03
    """A second of work sent to the replica lately, beyond `tolerance` above the least of the candidates."""
    tolerance: float = 0.05
    """Share by which recent work may differ before affinity yields to it; below, it only settles where cold prompts go."""
    overdue: float = 1.0
    """A second by which the first token is predicted to miss its deadline, on top of the wait itself."""
    miss_s: float = 5.0
    """What missing a deadline costs, by however little: affinity is no reason to do so where another replica is in time."""


class ScoringPolicy:
    """Cost = wait + prefill of what is not cached + slow-down of others + eviction + slower decode + imbalance.

    Affinity is only the prefill that a cached prefix saves, so it yields as soon as the chosen replica's own wait costs
    more, and a prefix that every replica holds favours none. Ties (within `tie_s`) go by rendezvous hash of the first block
    that nobody holds.
    """

    examines_all = False

    def __init__(self, weights: ScoringWeights | None = None, *, expected_output_tokens: int = 256, tie_s: float = 1e-4) -> None:
        self._weights = weights if weights is not None else ScoringWeights()
        self._expected_output_tokens = expected_output_tokens
        self._tie_s = tie_s

    def choose(self, request: RoutingRequest, snapshot: ClusterSnapshot, seed: int) -> Decision:
        work_s = [replica.recent_work_s for replica in snapshot.replicas]
        least_work_s = min(work_s)
        utilization = min(_MAX_UTILIZATION, sum(work_s) / len(work_s) / RECENT_WORK_S)
        num_behind = self._weights.queueing * utilization / (1 - utilization)
        scores = [self._score(request, replica, snapshot.now_s, least_work_s, num_behind) for replica in snapshot.replicas]
        limit = min(score.cost for score in scores) + self._tie_s
        tied = [index for index, score in enumerate(scores) if score.cost <= limit]
        best = tied[0]
        if len(tied) > 1:
            key = _prefix_key(request, snapshot)
            best = max(tied, key=lambda index: rendezvous_weight(key, scores[index].replica_id))
        chosen, terms = snapshot.replicas[best], dict(scores[best].terms)
        return Decision(
            request_id=request.request_id,
            replica_id=chosen.replica_id,
            predicted_ttft_s=terms["wait"] + terms["prefill"] + terms["pending"] + (chosen.stats.decode_step_s or 0.0),
            num_cached_tokens=min(chosen.num_cached_blocks * chosen.block_size, request.num_prompt_tokens),
            candidates=tuple(scores),
        )

    def _score(
        self, request: RoutingRequest, replica: ReplicaSnapshot, now_s: float, least_work_s: float, num_behind: float
    ) -> CandidateScore:
        weights, stats, size = self._weights, replica.stats, replica.block_size
        rate = stats.prefill_tokens_per_s or 1.0
        num_outputs = min(request.max_tokens, self._expected_output_tokens * request.num_choices)
        num_cached = replica.num_cached_blocks * size
        num_uncached = max(1, request.num_prompt_tokens - num_cached)
        num_pending = min(num_uncached - 1, max(0, replica.num_pending_blocks * size - num_cached))
        wait_s = self._wait_s(request, replica, num_uncached, num_outputs)
        prefill_s = num_uncached / rate
        pending_s = -weights.pending * num_pending / rate
        computed_s = prefill_s + pending_s
        # blocks that are neither held nor worth keeping are taken first; what is beyond them evicts
        num_new_blocks = (num_uncached - num_pending + num_outputs) / size
        num_blank_blocks = max(0, min(stats.num_free_blocks, stats.num_blocks - stats.num_cached_blocks))
        eviction_s = weights.eviction * max(0.0, num_new_blocks - num_blank_blocks) * size / rate
        queueing_s = num_behind * computed_s
        slowdown_s = weights.slowdown * stats.num_running * computed_s
        decode_s = weights.decode * num_outputs * (stats.decode_step_s or 0.0)
        ahead_s = replica.recent_work_s - least_work_s
        balance_s = _COLD_BALANCE * ahead_s + weights.balance * max(0.0, ahead_s - weights.tolerance * least_work_s)
        terms: tuple[tuple[str, float], ...] = (
            ("wait", wait_s),
            ("prefill", prefill_s),
            ("pending", pending_s),
            ("queueing", queueing_s),
            ("slowdown", slowdown_s),
            ("eviction", eviction_s),
            ("decode", decode_s),
            ("balance", balance_s),
        )
        cost = wait_s + prefill_s + pending_s + queueing_s + slowdown_s + eviction_s + decode_s + balance_s
        if request.deadline_s is not None:
            late_s = now_s + wait_s + computed_s - request.deadline_s
            overdue_s = weights.miss_s + weights.overdue * late_s if late_s > 0 else 0.0
            terms = (*terms, ("overdue", overdue_s))
            cost += overdue_s
        return CandidateScore(replica_id=replica.replica_id, cost=cost, terms=terms)

    def _wait_s(self, request: RoutingRequest, replica: ReplicaSnapshot, num_uncached: int, num_outputs: int) -> float:
        """Prefill queued before this request; or, if longer, until a slot and enough blocks come free.

        Little's law gives the latter: what is held leaves within the time that one answer takes.
        """
        stats = replica.stats
        rate = stats.prefill_tokens_per_s or 1.0
        reported_s = max(0.0, stats.num_uncomputed_tokens / rate - replica.report_age_s)
        queued_s = reported_s + replica.num_booked_prefill_tokens / rate
        num_before = stats.num_running + stats.num_waiting + replica.num_booked_requests
        answer_s = self._expected_output_tokens * (stats.decode_step_s or 0.0)
        num_too_many = num_before + request.num_choices - replica.max_num_seqs
        slots_s = max(0, num_too_many) * answer_s / replica.max_num_seqs
        num_held_blocks = stats.num_blocks - stats.num_free_blocks
        num_needed_blocks = (num_uncached + num_outputs + replica.num_booked_context_tokens) / replica.block_size
        blocks_s = 0.0
        if stats.num_blocks and num_needed_blocks > stats.num_free_blocks:
            blocks_s = (num_needed_blocks - stats.num_free_blocks) * answer_s / max(1, num_held_blocks)
        return max(queued_s, slots_s, blocks_s)


def _prefix_key(request: RoutingRequest, snapshot: ClusterSnapshot) -> bytes:
    keys = request.block_keys
    if not keys:
        return request.request_id.encode()
    deepest = max(max(replica.num_cached_blocks, replica.num_pending_blocks) for replica in snapshot.replicas)
    return keys[min(deepest, len(keys) - 1)]
