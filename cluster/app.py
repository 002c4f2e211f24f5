"""The whole cluster on one screen: gateways ask the router, then stream from the replicas that it names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig

from cluster.gateway import Gateway
from cluster.serve.surge import SURGE_PERCENT, Need, has_room_for
from cluster.serve.targeted_dispatch import TargetedDispatch
from cluster.settings.config import ClusterConfig, ModelConfig, read_config, read_environment
from cluster.settings.pool_config import ResolvedPool
from replicas.deployment import ReplicaDeployment, shutdown_timeout_s
from replicas.engine_config import Role
from replicas.process.cores import CoreDemand
from router.deployment import RouterDeployment

_GATEWAY = "gateway"
_DRAIN_LOOK_S = 0.5
"""How often Serve looks whether what drains is empty."""


def build(args: dict[str, Any]) -> Application:
    """Called by Serve with the application's `args`. Raises ConfigError: one line that names the key and the fix."""
    config, log_level = read_config(args), read_environment().log_level
    pools = [pool for model in config.models for pool in model.pools]
    surge_percent = SURGE_PERCENT if has_room_for(_needs(config)) else 0
    router_options = {"name": "router", "ray_actor_options": {"num_cpus": 0.1}}
    names = frozenset(model.name for model in config.models)
    router = _shell(RouterDeployment).options(**router_options).bind(config.router, names, log_level)
    replicas = {
        model.name: {pool.role: _replicas(model, pool, pools, router, log_level, surge_percent) for pool in model.pools}
        for model in config.models
    }
    gateway = _shell(Gateway).options(
        name=_GATEWAY,
        num_replicas=config.gateway.num_replicas,
        ray_actor_options={"num_cpus": config.gateway.num_cpus},
        max_surge_percent=surge_percent,
        graceful_shutdown_timeout_s=config.gateway.drain_s,
        graceful_shutdown_wait_loop_s=_DRAIN_LOOK_S,
    )
    targets = {model.name: model.targets for model in config.models}
    return gateway.bind(config.gateway, router, replicas, targets, log_level)


def _replicas(
    model: ModelConfig, pool: ResolvedPool, pools: Sequence[ResolvedPool], router: Application, log_level: str, surge_percent: int
) -> Application:
    """One pool of a model; `pools` are those of all models, which share the machines and the router's time."""
    deployment = _shell(ReplicaDeployment).options(
        name=deployment_name(model.name, pool.role),
        num_replicas=pool.num_replicas,
        ray_actor_options={"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus},
        request_router_config=RequestRouterConfig(request_router_class=TargetedDispatch),
        max_surge_percent=surge_percent,
        graceful_shutdown_timeout_s=shutdown_timeout_s(model.drain_s, pool.engine),
        graceful_shutdown_wait_loop_s=_DRAIN_LOOK_S,
        **_bundles(pool),
    )
    num_replicas_in_all = sum(each.num_replicas for each in pools)
    demand = CoreDemand.of((each.num_replicas * each.engine.tensor_parallel_size, each.engine.num_threads) for each in pools)
    return deployment.bind(model.name, pool.engine, num_replicas_in_all, demand, model.drain_s, router, log_level)


def deployment_name(model: str, role: Role) -> str:
    """As Serve shows it: replica-MODEL, or replica-MODEL-prefill and replica-MODEL-decode."""
    name = f"replica-{re.sub(r'[^A-Za-z0-9_.-]', '-', model)}"
    return name if role == "unified" else f"{name}-{role}"


def _needs(config: ClusterConfig) -> list[Need]:
    gateway = Need(deployment=_GATEWAY, num_replicas=config.gateway.num_replicas, bundle={"CPU": config.gateway.num_cpus})
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
    return [gateway, *pools]


def _bundles(pool: ResolvedPool) -> dict[str, Any]:
    """A replica's placement group: a bundle for each rank, of which the replica's own actor takes the first."""
    size = pool.engine.tensor_parallel_size
    if size == 1:
        return {}
    bundle = {name: amount for name, amount in (("CPU", pool.num_cpus), ("GPU", pool.num_gpus)) if amount > 0}
    return {"placement_group_bundles": [bundle] * size, "placement_group_strategy": pool.placement_strategy}


def _shell(deployment: Any) -> Deployment:
    """The deployment that `serve.deployment` made of a class; type checkers still see the class."""
    return deployment
