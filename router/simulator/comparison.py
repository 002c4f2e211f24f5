"""Runs a trace under a policy and gives its figures, and finds the load at which a policy saturates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

from router.config import PolicyName, RouterConfig
from router.policies.policy_choice import make_policy
from router.simulator.hardware import StepTimer
from router.simulator.outcome import percentiles, summarize
from router.simulator.simulation import Simulation, SimulationConfig
from router.simulator.traces import TraceRequest

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def router_config(policy: PolicyName, base: RouterConfig | None = None) -> RouterConfig:
    """`scoring` with full admission control; classic policies as usually deployed: in order of arrival, dispatched at once."""
    config = replace(base if base is not None else RouterConfig(), policy=policy)
    if policy == "scoring":
        return config
    return replace(config, orders=("fcfs",), dispatch_ahead=None, max_wait_s=None, max_wait_s_by_priority={})


def run_policy(
    policy: PolicyName,
    trace: Sequence[TraceRequest],
    config: SimulationConfig,
    timer: StepTimer,
    base: RouterConfig | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> dict[str, object]:
    """One run's figures. All except `wall` are deterministic."""
    chosen = router_config(policy, base)
    result = Simulation(config, chosen, make_policy(chosen), timer).run(trace, on_progress)
    return {
        "policy": policy,
        **summarize(
            result.outcomes,
            num_replicas=config.num_replicas,
            end_s=result.end_s,
            strict_uncached=(config.ttft_limit_s, config.ttft_limit_s_per_token),
        ),
        "num_preemptions": sum(replica.stats().num_preemptions for replica in result.replicas),
        "busy_share": sum(replica.busy_s for replica in result.replicas) / (result.end_s * config.num_replicas),
        "plans": dict(result.plans),
        "num_moved_tokens": result.num_moved_tokens,
        "moving_s": result.moving_s,
        "wall": {"decision_s": percentiles(result.decision_s)},
    }


def find_saturation(
    policy: PolicyName,
    trace: Sequence[TraceRequest],
    config: SimulationConfig,
    timer: StepTimer,
    *,
    low: float,
    high: float,
    num_rounds: int = 6,
    max_overhang: float = 0.05,
) -> float:
    """The largest speed-up at which `policy` keeps up: all requests end within `1 + max_overhang` times the span of arrivals.

    Bisects between `low` (must keep up) and `high` (must not) on a logarithmic scale. Raises ValueError when they do not
    bracket the answer.
    """

    def keeps_up(speedup: float) -> bool:
        figures = run_policy(policy, trace, replace(config, speedup=speedup), timer)
        end_s = figures["end_s"]
        assert isinstance(end_s, float)
        return end_s <= (1 + max_overhang) * trace[-1].arrival_s / speedup

    if not keeps_up(low) or keeps_up(high):
        raise ValueError(f"saturation must lie between {low} and {high}")
    for _ in range(num_rounds):
        middle = (low * high) ** 0.5
        if keeps_up(middle):
            low = middle
        else:
            high = middle
    return low
