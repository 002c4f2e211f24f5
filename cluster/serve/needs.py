"""What a configuration asks of the machines, and whether one machine has it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.settings.config import ClusterConfig
from replicas.engine_config import Role

GATEWAY = "gateway"
ROUTER = "router"
ROUTER_CPUS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Resources that one deployment wants."""

    deployment: str
    num_replicas: int
    bundle: Mapping[str, float]
    """Each of its actors: resource -> amount."""
    num_actors: int = 1
    """Actors of one replica: as many as it has ranks."""

    def total(self, resource: str) -> float:
        return self.num_replicas * self.num_actors * self.bundle.get(resource, 0.0)


def needs_of(config: ClusterConfig) -> tuple[list[Need], list[Need]]:
    """Router and gateways, and the pools of all models."""
    front = [
        Need(deployment=ROUTER, num_replicas=1, bundle={"CPU": ROUTER_CPUS}),
        Need(deployment=GATEWAY, num_replicas=config.gateway.num_replicas, bundle={"CPU": config.gateway.num_cpus}),
    ]
    pools = [
        Need(
            deployment=deployment_name(model.name, pool.role),
            num_replicas=pool.num_replicas,
            bundle={"CPU": pool.num_cpus, "GPU": pool.num_gpus},
            num_actors=pool.engine.tensor_parallel_size,
        )
        for model in config.models
        for pool in model.pools
    ]
    return front, pools


def deployment_name(model: str, role: Role) -> str:
    """As Serve shows it: replica-MODEL, or replica-MODEL-prefill and replica-MODEL-decode."""
    name = f"replica-{re.sub(r'[^A-Za-z0-9_.-]', '-', model)}"
    return name if role == "unified" else f"{name}-{role}"


def why_no_room(front: Sequence[Need], pools: Sequence[Need], machine: Mapping[str, float]) -> str | None:
    """One line that names a setting that fits, if a cluster of this machine alone can never hold all of it; `machine` is its
    resources in all."""
    num_gpus = machine.get("GPU", 0.0)
    for need in pools:
        if need.bundle.get("GPU", 0.0) > 0 and need.total("GPU") > num_gpus:
            return (
                f"{need.deployment} wants {need.total('GPU'):g} GPUs ({need.num_replicas} replicas, {need.num_actors} ranks each, "
                f"num_gpus {need.bundle['GPU']:g}), and Ray finds {num_gpus:g} here: lower num_gpus, or use a machine that has them"
            )
    num_cpus = machine.get("CPU", 0.0)
    rest = sum(need.total("CPU") for need in front)
    wanted = sum(need.total("CPU") for need in pools)
    if rest + wanted <= num_cpus + 1e-6:
        return None
    share = max(0.0, num_cpus - rest) / wanted if wanted else 0.0
    fitting = {need.deployment: _floor(share * need.bundle["CPU"]) for need in pools if need.bundle["CPU"] > 0}
    if not fitting or not all(fitting.values()):
        advice = "fewer gateways or replicas"
    else:
        advice = "num_cpus " + ", ".join(f"{amount:g} ({name})" for name, amount in fitting.items()) + " fits, and so do fewer replicas"
    replicas = ", ".join(
        f"{need.num_replicas * need.num_actors} of {need.deployment} at num_cpus {need.bundle['CPU']:g}"
        for need in pools
        if need.total("CPU")
    )
    return f"{rest + wanted:g} CPUs are wanted ({replicas}; router and gateways {rest:g}), and Ray counts {num_cpus:g} here: {advice}"


def _floor(amount: float) -> float:
    """To hundredths."""
    return math.floor(amount * 100 + 1e-6) / 100
