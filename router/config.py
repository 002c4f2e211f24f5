"""Settings of the router: frozen and checked once. Configuration files are converted to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

PolicyName = Literal["scoring", "least_loaded", "round_robin", "power_of_two", "longest_prefix", "consistent_hash"]
AdmissionOrder = Literal["fcfs", "priority", "fair", "slo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """One router's settings, the same for every model it serves."""

    policy: PolicyName = "scoring"
    """The rule that chooses a replica; see router/README.md."""
    orders: tuple[AdmissionOrder, ...] = ("priority", "fair", "slo")
    """Criteria for the next request, the most important first; ties are served in order of arrival.
    `("fcfs",)` alone is plain arrival order."""
    dispatch_ahead: int | None = 2
    """A replica gets a request only while fewer than this many wait inside it, so that the order decided here is the
    order kept. None dispatches every request at once, like a plain load balancer."""
    lookahead: int = 16
    """Number of waiting requests that one step may pass over while the replicas that they want are full."""
    max_queue_requests: int = 4_096
    """Maximum number of requests waiting here for one model; beyond it the lowest priority is rejected first."""
    max_queue_requests_per_tenant: int | None = None
    """Maximum number of waiting requests of one tenant for one model; None sets no limit."""
    max_wait_s: float | None = None
    """Requests with a longer predicted wait in the queue are rejected at once; None sets no limit."""
    max_wait_s_by_priority: Mapping[int, float] = field(default_factory=dict)
    """priority -> limit that replaces `max_wait_s` for it."""
    aging_s: float = 10.0
    """After waiting this long per level of difference, a request may pass one of a better priority."""
    aging_share: int = 8
    """At most one dispatch in this many goes to a request that passed by age (or that is already late), so that a
    flood of old requests of low priority delays a new urgent one by at most one dispatch."""
    fair_input_weight: float = 1.0
    """Service of one computed prompt token (w_p of the virtual token counter, arXiv 2401.00588)."""
    fair_output_weight: float = 2.0
    """Service of one generated token (w_q)."""
    fair_cached_weight: float = 0.0
    """Service of one prompt token found in a cache; 0 because cached tokens cost almost nothing (arXiv 2501.14312)."""
    locality_quantum_tokens: float = 0.0
    """Tenants whose counters are within this much of the smallest may be served out of turn, longest cached prefix
    first (the deficit of arXiv 2501.14312). The fairness bound grows by the same amount. 0 keeps the strict order."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Share of a tenant relative to others; 1 where missing."""
    default_ttft_slo_s: float = 10.0
    """Deadline after arrival assumed for requests without one. It orders them among requests with a deadline, and limits how long
    they wait for a cached prefix when another replica would be in time."""
    booking_expiry_s: float = 10.0
    """A dispatched request that no report has shown after this long is presumed lost."""
    lease_s: float = 3_600.0
    """A request that was not released after this long is forgotten, because its caller is presumed dead."""
    caller_lease_s: float = 10.0
    """A gateway that did not renew its lease for this long is presumed dead: its requests are cancelled everywhere."""
    hang_timeout_s: float = 2.5
    """A replica silent for this long is presumed hung, and its streams continue on other replicas. Replicas send a heartbeat twice a
    second, however long a step takes; with very many replicas, which report less often, the timeout grows to five reports."""
    report_timeout_s: float = 30.0
    """A replica silent for longer gets work only when no other replica can take it."""
    no_replica_timeout_s: float = 10.0
    """How long a request waits for the first replica of its model before it is rejected as unavailable."""
    prior_prefill_tokens_per_s: float = 4_000.0
    """Prefill rate assumed before any replica of the model has measured one."""
    prior_decode_step_s: float = 0.03
    """Decode step assumed before any replica of the model has measured one."""
    prior_transfer_tokens_per_s: float = 50_000.0
    """Rate of KV from the prefill to the decode pool assumed before any decode replica of the model has measured one."""
    expected_output_tokens: int = 256
    """Output length assumed before requests of the model have ended (bounded by each request's `max_tokens`)."""
    max_candidates: int = 8
    """Number of replicas that the scoring policy examines in full, after a first estimate over all of them."""
    num_explained: int = 1_024
    """Number of recent decisions kept for `explain`."""
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.policy in get_args(PolicyName), "policy", f"one of {', '.join(get_args(PolicyName))}", self.policy)
        known = get_args(AdmissionOrder)
        _require(all(order in known for order in self.orders), "orders", f"taken from {', '.join(known)}", self.orders)
        _require(len(set(self.orders)) == len(self.orders), "orders", "without repeats", self.orders)
        ranks = [("priority", "fair", "slo", "fcfs").index(order) for order in self.orders]
        _require(ranks == sorted(ranks), "orders", "in the order priority, fair, slo, fcfs", self.orders)
        for name in ("lookahead", "max_queue_requests", "aging_share", "expected_output_tokens", "max_candidates", "num_explained"):
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("dispatch_ahead", "max_queue_requests_per_tenant"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, "at least 1, or null", value)
        for name in (
            "aging_s",
            "default_ttft_slo_s",
            "booking_expiry_s",
            "lease_s",
            "caller_lease_s",
            "report_timeout_s",
            "no_replica_timeout_s",
            "prior_prefill_tokens_per_s",
            "prior_decode_step_s",
            "prior_transfer_tokens_per_s",
        ):
            _require(getattr(self, name) > 0, name, "above 0", getattr(self, name))
        _require(self.hang_timeout_s >= 1, "hang_timeout_s", "at least 1: replicas say a word twice a second", self.hang_timeout_s)
        for name in ("fair_input_weight", "fair_output_weight", "fair_cached_weight", "locality_quantum_tokens"):
            _require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        _require(self.max_wait_s is None or self.max_wait_s > 0, "max_wait_s", "above 0, or null", self.max_wait_s)
        waits = self.max_wait_s_by_priority
        _require(all(wait > 0 for wait in waits.values()), "max_wait_s_by_priority", "above 0", dict(waits))
        weights = self.tenant_weights
        _require(all(weight > 0 for weight in weights.values()), "tenant_weights", "above 0", dict(weights))

    def wait_limit_s(self, priority: int) -> float | None:
        """Longest predicted wait at which a request of `priority` is still admitted."""
        return self.max_wait_s_by_priority.get(priority, self.max_wait_s)


def _require(holds: bool, name: str, allowed: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
