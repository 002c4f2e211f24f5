"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.settings.cors import CorsRules
from cluster.settings.failover import FailoverPolicy
from cluster.settings.limits import RequestLimits
from cluster.settings.priorities import PriorityRules


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Settings of the gateways; all gateway replicas have the same."""

    num_replicas: int = 1
    num_cpus: float = 0.1
    """CPUs that Ray reserves for each gateway. The default is small, because gateways share cores with other processes."""
    drain_s: float = 600.0
    """How long a stopping gateway keeps its open connections, which no other can take over. New ones go to its successor."""
    limits: RequestLimits = field(default_factory=RequestLimits)
    failover: FailoverPolicy = field(default_factory=FailoverPolicy)
    tenant_header: str = "X-Tenant"
    """HTTP header with the tenant's name, for fairness and logs; requests without it share the tenant "default"."""
    priorities: PriorityRules = field(default_factory=PriorityRules)
    cors: CorsRules = field(default_factory=CorsRules)
    """Web pages that may call the API from a browser; none unless named."""
    log_prompts: bool = False
    """Whether the access log has prompts. Off by default, because users' text does not belong in logs."""

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, got {self.num_replicas}")
        if self.num_cpus < 0:
            raise ValueError(f"num_cpus must be at least 0, got {self.num_cpus}")
        if self.drain_s < 0:
            raise ValueError(f"drain_s must be at least 0, got {self.drain_s}")
        if not self.tenant_header.replace("-", "").isalnum():
            raise ValueError(f"tenant_header must be the name of an HTTP header, got {self.tenant_header!r}")
