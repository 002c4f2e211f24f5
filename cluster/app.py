"""The whole cluster on one screen: gateways ask the router, then stream from the replicas that it names."""

from __future__ import annotations

import re
from typing import Any

from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig

from cluster.config import ClusterConfig, ModelConfig, read_config, read_environment
from cluster.gateway import Gateway
from cluster.surge import SURGE_PERCENT, has_room_for
from cluster.targeted_dispatch import TargetedDispatch
from replicas.cores import CoreDemand
from replicas.deployment import DRAIN_MARGIN_S, ReplicaDeployment
from router.deployment import RouterDeployment

_DRAIN_LOOK_S = 0.5
"""How often Serve looks whether what drains is empty."""


def build(args: dict[str, Any]) -> Application:
    """Called by Serve with the application's `args`. Raises ConfigError: one line that names the key and the fix."""
    config, log_level = read_config(args), read_environment().log_level
    ranks = [model for model in config.models for _ in range(model.engine.tensor_parallel_size)]
    needs = [{"CPU": config.gateway.num_cpus}, *({"CPU": model.num_cpus, "GPU": model.num_gpus} for model in ranks)]
    surge_percent = SURGE_PERCENT if has_room_for(needs) else 0
    router = _shell(RouterDeployment).options(name="router", ray_actor_options={"num_cpus": 0.1}).bind(config.router, log_level)
    replicas = {model.name: _replicas(model, config, router, log_level, surge_percent) for model in config.models}
    gateway = _shell(Gateway).options(
        name="gateway",
        num_replicas=config.gateway.num_replicas,
        ray_actor_options={"num_cpus": config.gateway.num_cpus},
        max_surge_percent=surge_percent,
        graceful_shutdown_timeout_s=config.gateway.drain_s,
        graceful_shutdown_wait_loop_s=_DRAIN_LOOK_S,
    )
    return gateway.bind(config.gateway, router, replicas, log_level)


def _replicas(model: ModelConfig, config: ClusterConfig, router: Application, log_level: str, surge_percent: int) -> Application:
    deployment = _shell(ReplicaDeployment).options(
        name=f"replica-{re.sub(r'[^A-Za-z0-9_.-]', '-', model.name)}",
        num_replicas=model.num_replicas,
        ray_actor_options={"num_cpus": model.num_cpus, "num_gpus": model.num_gpus},
        request_router_config=RequestRouterConfig(request_router_class=TargetedDispatch),
        max_surge_percent=surge_percent,
        graceful_shutdown_timeout_s=model.drain_s + DRAIN_MARGIN_S,
        graceful_shutdown_wait_loop_s=_DRAIN_LOOK_S,
        **_bundles(model),
    )
    num_replicas_in_all = sum(each.num_replicas for each in config.models)
    demand = CoreDemand.of((each.num_replicas * each.engine.tensor_parallel_size, each.engine.num_threads) for each in config.models)
    return deployment.bind(model.name, model.engine, num_replicas_in_all, demand, model.drain_s, router, log_level)


def _bundles(model: ModelConfig) -> dict[str, Any]:
    """A replica's placement group: a bundle for each rank, of which the replica's own actor takes the first."""
    size = model.engine.tensor_parallel_size
    if size == 1:
        return {}
    bundle = {name: amount for name, amount in (("CPU", model.num_cpus), ("GPU", model.num_gpus)) if amount > 0}
    return {"placement_group_bundles": [bundle] * size, "placement_group_strategy": model.placement_strategy}


def _shell(deployment: Any) -> Deployment:
    """What `serve.deployment` made of a class; type checkers still see the class."""
    return deployment
