"""The default policy: predicts each candidate's cost in seconds and chooses the cheapest."""

from __future__ import annotations

from router.policies.plan_costs import PlanCosts
from router.policies.policy import cached_tokens, prefix_key, rendezvous_weight
from router.policies.replica_costs import ReplicaCosts, ScoringWeights
from router.snapshot import ClusterSnapshot, Decision, RoutingRequest


class ScoringPolicy:
    """Chooses the cheapest replica (`ReplicaCosts`); with pools, the cheapest plan (`PlanCosts`).

    Affinity is only the prefill that a cached prefix saves this request and others. So it yields as soon as the replica's own wait
    costs more, and a prefix that every replica holds favours none. Ties (within `tie_s`) are broken by a rendezvous hash of the first
    block that no replica holds.
    """

    examines_all = False

    def __init__(
        self,
        weights: ScoringWeights | None = None,
        *,
        expected_output_tokens: int = 256,
        default_ttft_slo_s: float = 10.0,
        tie_s: float = 1e-4,
    ) -> None:
        """A request without a deadline counts as overdue `default_ttft_slo_s` after its arrival."""
        self._costs = ReplicaCosts(
            weights if weights is not None else ScoringWeights(),
            expected_output_tokens=expected_output_tokens,
            default_ttft_slo_s=default_ttft_slo_s,
        )
        self._plans = PlanCosts(self._costs)
        self._tie_s = tie_s

    def choose(self, request: RoutingRequest, snapshot: ClusterSnapshot, seed: int) -> Decision:
        if snapshot.prefill:
            return self._choose_plan(request, snapshot)
        costs, replicas = self._costs, snapshot.replicas
        prices, num_outputs, due_s = costs.prices(replicas), costs.num_outputs(request), costs.due_s(request)
        scores = [costs.score(request, replica, snapshot.now_s, num_outputs, prices, due_s) for replica in replicas]
        limit = min([score.cost_s for score in scores]) + self._tie_s
        tied = [index for index, score in enumerate(scores) if score.cost_s <= limit]
        best = tied[0]
        if len(tied) > 1:
            key = prefix_key(request, replicas)
            best = max(tied, key=lambda index: rendezvous_weight(key, scores[index].replica_id))
        chosen, terms = replicas[best], dict(scores[best].terms)
        return Decision(
            request_id=request.request_id,
            replica_id=chosen.replica_id,
            replica_role=chosen.role,
            predicted_ttft_s=terms["wait"] + terms["prefill"] + terms["pending"] + (chosen.stats.decode_step_s or 0.0),
            num_cached_tokens=cached_tokens(request, chosen),
            candidates=tuple(scores),
        )

    def _choose_plan(self, request: RoutingRequest, snapshot: ClusterSnapshot) -> Decision:
        plans = self._plans.plans(request, snapshot)
        limit = min([plan.score.cost_s for plan in plans]) + self._tie_s
        tied = [plan for plan in plans if plan.score.cost_s <= limit]
        key = prefix_key(request, (*snapshot.replicas, *snapshot.prefill)) if len(tied) > 1 else b""
        chosen = max(tied, key=lambda plan: rendezvous_weight(key, plan.name)) if key else tied[0]
        return Decision(
            request_id=request.request_id,
            replica_id=chosen.runs.replica_id,
            replica_role=chosen.runs.role,
            prefill_replica_id=chosen.score.prefill_replica_id,
            predicted_ttft_s=chosen.ttft_s,
            num_cached_tokens=cached_tokens(request, chosen.computes),
            candidates=tuple([plan.score for plan in plans]),
        )
