"""From the name in the configuration to the policy."""

from __future__ import annotations

from router.config import RouterConfig
from router.policies import ConsistentHash, LeastLoaded, LongestPrefix, Policy, PowerOfTwo, RoundRobin
from router.scoring import ScoringPolicy


def make_policy(config: RouterConfig) -> Policy:
    """The policy that `config.policy` names."""
    policies: dict[str, Policy] = {
        "scoring": ScoringPolicy(expected_output_tokens=config.expected_output_tokens, default_ttft_slo_s=config.default_ttft_slo_s),
        "least_loaded": LeastLoaded(),
        "round_robin": RoundRobin(),
        "power_of_two": PowerOfTwo(),
        "longest_prefix": LongestPrefix(),
        "consistent_hash": ConsistentHash(),
    }
    return policies[config.policy]
