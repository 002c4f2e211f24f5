"""Makes the policy that the configuration names."""

from __future__ import annotations

from router.config import RouterConfig
from router.policies.policy import ConsistentHash, LeastLoaded, LongestPrefix, PairedPools, Policy, PowerOfTwo, RoundRobin
from router.policies.scoring import ScoringPolicy


def make_policy(config: RouterConfig) -> Policy:
    """The policy that `config.policy` names."""
    if config.policy == "scoring":
        return ScoringPolicy(expected_output_tokens=config.expected_output_tokens, default_ttft_slo_s=config.default_ttft_slo_s)
    rules: dict[str, Policy] = {
        "least_loaded": LeastLoaded(),
        "round_robin": RoundRobin(),
        "power_of_two": PowerOfTwo(),
        "longest_prefix": LongestPrefix(),
        "consistent_hash": ConsistentHash(),
    }
    return PairedPools(rules[config.policy])
