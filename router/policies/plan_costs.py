"""The cost of a request where prefill and decode have separate pools: on a pair of replicas, or on one that does everything."""

from __future__ import annotations

from collections.abc import Mapping
from math import hypot
from statistics import fmean
from typing import NamedTuple

from router.policies.policy import num_requests
from router.policies.replica_costs import PoolPrices, ReplicaCosts
from router.snapshot import CandidateScore, ClusterSnapshot, ReplicaSnapshot, RoutingRequest


class Plan(NamedTuple):
    """One way to serve a request, with its cost."""

    computes: ReplicaSnapshot
    """The replica that computes the prompt."""
    runs: ReplicaSnapshot
    """The replica that decodes; equal to `computes` unless the plan is a pair."""
    score: CandidateScore
    ttft_s: float
    """Time from now to the first token, which comes from `computes`."""

    @property
    def name(self) -> str:
        return f"{self.computes.replica_id} {self.runs.replica_id}"


class _Prefill(NamedTuple):
    """A replica of the prefill pool as the first of a pair."""

    replica: ReplicaSnapshot
    cost: float
    terms: Mapping[str, float]
    computed_s: float
    ready_s: float
    """Time until the first token."""


class _Decode(NamedTuple):
    """A replica of the decode pool as the second of a pair."""

    replica: ReplicaSnapshot
    cost: float
    terms: Mapping[str, float]
    wait_s: float
    """Time until it has a slot and blocks."""
    transfer_s: float
    step_s: float


class PlanCosts:
    """Compares all plans by predicted seconds, instead of by a fixed limit on the prompt's length.

    - A pair: the prefill replica's usual cost without decoding, plus the delay of the second token by the handoff, plus the
      decode replica's crowding. Transfer overlaps with the prefill, so only the rest of it counts; blocks that the decode
      replica already holds are not moved.
    - A decode replica alone: the usual cost, plus the time that its prefill adds to the steps of all requests that decode there. This
      is little while the prefill fits beside the reading of weights and KV, and all of the prefill when it is long. So the decode
      replica computes a short uncached part but not a long one; the limit follows from measured rates, load and caches of both pools.
    - A prefill replica alone: the usual cost, plus each second of the answer, because later prompts will delay it. This is cheaper
      only while the decode pool is behind by about the duration of an answer.
    """

    def __init__(self, costs: ReplicaCosts) -> None:
        self._costs = costs

    def plans(self, request: RoutingRequest, snapshot: ClusterSnapshot) -> list[Plan]:
        """Every replica alone, and the pairs of each prefill and each decode replica with its cheapest partner."""
        costs = self._costs
        first_prices = costs.prices(snapshot.prefill)
        # A computed token takes capacity from the next burst wherever it is computed, so it has one price.
        prices = costs.prices(snapshot.replicas)._replace(token_s=first_prices.token_s)
        decode_step_s = fmean([replica.stats.decode_step_s or 0.0 for replica in snapshot.replicas])
        plans = [self._alone(request, replica, snapshot.now_s, prices, decode_step_s) for replica in snapshot.replicas]
        plans += [self._alone(request, replica, snapshot.now_s, first_prices, decode_step_s) for replica in snapshot.prefill]
        decodes = [self._decode(request, replica) for replica in snapshot.replicas if replica.role == "decode"]
        if request.is_whole or not decodes:
            return plans
        prefills = [self._prefill(request, replica, snapshot.now_s, first_prices) for replica in snapshot.prefill]
        costs_by_pair = [[first.cost + second.cost + _handoff_s(first, second) for second in decodes] for first in prefills]
        shown = {(number, row.index(min(row))) for number, row in enumerate(costs_by_pair)}
        for number in range(len(decodes)):
            column = [row[number] for row in costs_by_pair]
            shown.add((column.index(min(column)), number))
        return plans + [_pair(prefills[first], decodes[second], costs_by_pair[first][second]) for first, second in sorted(shown)]

    def _alone(self, request: RoutingRequest, replica: ReplicaSnapshot, now_s: float, prices: PoolPrices, decode_step_s: float) -> Plan:
        costs = self._costs
        num_outputs = costs.num_outputs(request)
        if replica.role == "decode":  # its pending blocks come from prefill replicas, too late for a request that starts now
            replica = replica._replace(num_pending_blocks=replica.num_cached_blocks)
        score = costs.score(request, replica, now_s, num_outputs, prices, costs.due_s(request))
        step_s = replica.stats.decode_step_s or 0.0
        terms = dict(score.terms)
        ready_s = terms["wait"] + terms["prefill"] + terms["pending"]
        if replica.role == "prefill":
            # A prefill replica that decodes little has short steps now, but they will not stay shorter than the decode pool's.
            terms["misplaced"] = costs.weights.misplaced * num_outputs * max(step_s, decode_step_s)
        else:
            terms["crowding"] = self._crowding_s(request, replica, num_outputs)
        if replica.role == "decode":
            computed_s = terms["prefill"] + terms["pending"]
            num_aside = replica.behind.num_running if replica.behind is not None else 0
            num_beside = replica.stats.num_running - num_aside
            terms["slowdown"] = costs.weights.interference * (num_beside * (hypot(step_s, computed_s) - step_s) + num_aside * computed_s)
        return Plan(
            computes=replica,
            runs=replica,
            score=CandidateScore(replica.replica_id, sum(terms.values()), tuple(terms), tuple(terms.values())),
            ttft_s=ready_s + step_s,
        )

    def _prefill(self, request: RoutingRequest, replica: ReplicaSnapshot, now_s: float, prices: PoolPrices) -> _Prefill:
        score = self._costs.score(request, replica, now_s, 0, prices, self._costs.due_s(request))
        terms = dict(score.terms)
        slowdown_s = terms.pop("slowdown")  # no request decodes there
        terms.pop("decode")
        computed_s = terms["prefill"] + terms["pending"]
        return _Prefill(replica, score.cost_s - slowdown_s, terms, computed_s, terms["wait"] + computed_s)

    def _decode(self, request: RoutingRequest, replica: ReplicaSnapshot) -> _Decode:
        costs, stats = self._costs, replica.stats
        num_outputs = costs.num_outputs(request)
        num_moved = max(0, request.num_prompt_tokens - replica.num_pending_blocks * replica.block_size)
        step_s = stats.decode_step_s or 0.0
        decode_s = costs.weights.decode * num_outputs * step_s
        crowding_s = self._crowding_s(request, replica, num_outputs)
        return _Decode(
            replica=replica,
            cost=decode_s + crowding_s,
            terms={"decode": decode_s, "crowding": crowding_s},
            wait_s=costs.wait_s(request, replica, num_moved, num_outputs),
            transfer_s=num_moved / (stats.transfer_tokens_per_s or 1.0),
            step_s=step_s,
        )

    def _crowding_s(self, request: RoutingRequest, replica: ReplicaSnapshot, num_outputs: int) -> float:
        """The time that other decoding requests add to the answer: steps grow with their rows and the KV that they read.

        Bookings count too, so that a burst spreads over the decode pool before reports show it.
        """
        stats = replica.stats
        share = (num_requests(replica) + request.num_choices) / replica.max_num_seqs
        if stats.num_blocks:
            num_new_tokens = max(0, request.num_prompt_tokens - replica.num_cached_blocks * replica.block_size) + num_outputs
            num_held = stats.num_blocks - stats.num_free_blocks
            num_held_later = num_held + (replica.num_booked_context_tokens + num_new_tokens) / replica.block_size
            share = max(share, num_held_later / stats.num_blocks)
        return self._costs.weights.decode * num_outputs * (stats.decode_step_s or 0.0) * share


def _handoff_s(first: _Prefill, second: _Decode) -> float:
    """The delay of the second token: waiting for a slot, KV transfer beyond the prefill, and the first decode step."""
    return max(0.0, second.wait_s - first.ready_s, second.transfer_s - first.computed_s) + second.step_s


def _pair(first: _Prefill, second: _Decode, cost: float) -> Plan:
    terms = {**first.terms, "handoff": _handoff_s(first, second), **second.terms}
    score = CandidateScore(second.replica.replica_id, cost, tuple(terms), tuple(terms.values()), first.replica.replica_id)
    return Plan(computes=first.replica, runs=second.replica, score=score, ttft_s=first.ready_s)
