"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.choice_streams import FailoverPolicy
from cluster.limits import RequestLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """One gateway's settings; every gateway replica has the same."""

    num_replicas: int = 1
    num_cpus: float = 0.1
    """CPUs that Ray reserves for each; the gateway shares cores with whatever else runs."""
    limits: RequestLimits = field(default_factory=RequestLimits)
    failover: FailoverPolicy = field(default_factory=FailoverPolicy)
    tenant_header: str = "X-Tenant"
    """Header that names the tenant for fairness and logs; requests without it share the tenant "default"."""
    log_prompts: bool = False
    """Puts prompts into the access log. Off: text of users does not belong in logs."""

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, got {self.num_replicas}")
        if self.num_cpus < 0:
            raise ValueError(f"num_cpus must be at least 0, got {self.num_cpus}")
        if not self.tenant_header.replace("-", "").isalnum():
            raise ValueError(f"tenant_header must be the name of an HTTP header, got {self.tenant_header!r}")
