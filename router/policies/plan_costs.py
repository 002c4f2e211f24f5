"""What a request costs where prefill and decode have pools of their own: by a pair of replicas, or by one that does it all."""

from __future__ import annotations

from collections.abc import Mapping
from math import hypot
from statistics import fmean
from typing import NamedTuple

from router.policies.policy import num_requests
from router.policies.replica_costs import PoolPrices, ReplicaCosts
from router.snapshot import CandidateScore, ClusterSnapshot, ReplicaSnapshot, RoutingRequest


class Plan(NamedTuple):
    """Who does what, and what that costs."""

    computes: ReplicaSnapshot
    """Computes the prompt."""
    runs: ReplicaSnapshot
    """Goes on from there; the same replica unless it is a pair."""
    score: CandidateScore
    ttft_s: float
    """From now to the first token, which comes from `computes`."""

    @property
    def name(self) -> str:
        return f"{self.computes.replica_id} {self.runs.replica_id}"


class _Prefill(NamedTuple):
    """One replica of the prefill pool as the first of a pair."""

    replica: ReplicaSnapshot
    cost: float
    terms: Mapping[str, float]
    computed_s: float
    ready_s: float
    """When the first token is there."""


class _Decode(NamedTuple):
    """One replica of the decode pool as the second of a pair."""

    replica: ReplicaSnapshot
    cost: float
    terms: Mapping[str, float]
    wait_s: float
    """Until it has a slot and blocks."""
    transfer_s: float
    step_s: float


class PlanCosts:
    """Compares all plans in the same seconds, so that no fixed prompt length decides.

    - A pair: the prefill replica's usual cost without decoding, then what the handoff holds the second token up, and the
      decode replica's crowding. Transfer hides behind the prefill, and only what is left of it counts; blocks that the decode
      replica holds do not move.
    - A decode replica alone: the usual cost, with what its prefill adds to the steps of everything that decodes there: little
      while it fits beside the reading of weights and KV, all of it when it is long. So a short uncached part is computed
      there, a long one is not; where the line lies follows from measured rates, load and caches of both sides.
    - A prefill replica alone: the usual cost, and on top each second of the answer, which the next prompts will hold up. That
      is cheaper only while the decode pool is behind by about as long as an answer takes.
    """

    def __init__(self, costs: ReplicaCosts) -> None:
        self._costs = costs

    def plans(self, request: RoutingRequest, snapshot: ClusterSnapshot) -> list[Plan]:
        """Every replica alone; and of the pairs each prefill replica with its cheapest partner, and each decode replica with its."""
        costs = self._costs
        first_prices = costs.prices(snapshot.prefill)
        # A computed token is missing in the next burst wherever it is computed: it has one price.
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
        if replica.role == "decode":  # what it expects comes from prefill replicas, too late for a request that starts now
            replica = replica._replace(num_pending_blocks=replica.num_cached_blocks)
        score = costs.score(request, replica, now_s, num_outputs, prices, costs.due_s(request))
        step_s = replica.stats.decode_step_s or 0.0
        terms = dict(score.terms)
        ready_s = terms["wait"] + terms["prefill"] + terms["pending"]
        if replica.role == "prefill":
            # one answer alone has short steps for now: no reason to think that they stay shorter than where many decode
            terms["misplaced"] = costs.weights.misplaced * num_outputs * max(step_s, decode_step_s)
        else:
            terms["crowding"] = self._crowding_s(request, replica, num_outputs)
        if replica.role == "decode":
            computed_s = terms["prefill"] + terms["pending"]
            terms["slowdown"] = costs.weights.interference * replica.stats.num_running * (hypot(step_s, computed_s) - step_s)
        return Plan(
            computes=replica,
            runs=replica,
            score=CandidateScore(replica.replica_id, sum(terms.values()), tuple(terms), tuple(terms.values())),
            ttft_s=ready_s + step_s,
        )

    def _prefill(self, request: RoutingRequest, replica: ReplicaSnapshot, now_s: float, prices: PoolPrices) -> _Prefill:
        score = self._costs.score(request, replica, now_s, 0, prices, self._costs.due_s(request))
        terms = dict(score.terms)
        slowdown_s = terms.pop("slowdown")  # nothing decodes beside it
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
        """What the answer takes longer beside all that decodes there: steps grow with the KV that they read and with their rows.

        Counts what is booked, so a burst spreads over the decode pool though no report shows it yet.
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
    """How long the second token waits for a slot, for KV that the prefill did not hide, and for the step that takes it in."""
    return max(0.0, second.wait_s - first.ready_s, second.transfer_s - first.computed_s) + second.step_s


def _pair(first: _Prefill, second: _Decode, cost: float) -> Plan:
    terms = {**first.terms, "handoff": _handoff_s(first, second), **second.terms}
    score = CandidateScore(second.replica.replica_id, cost, tuple(terms), tuple(terms.values()), first.replica.replica_id)
    return Plan(computes=first.replica, runs=second.replica, score=score, ttft_s=first.ready_s)
