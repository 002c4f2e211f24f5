"""The whole cluster on one screen: gateways ask the router, then stream from the replicas that it names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException

from cluster.gateway import Gateway
from cluster.serve.needs import GATEWAY, ROUTER, ROUTER_CPUS, deployment_name, needs_of
from cluster.serve.proof import prove
from cluster.serve.surge import SURGE_PERCENT, has_room_for
from cluster.serve.targeted_dispatch import TargetedDispatch
from cluster.settings.config import ClusterConfig, ConfigError, ModelConfig, read_config, read_environment
from cluster.settings.pool_config import ResolvedPool
from replicas.deployment import ReplicaDeployment, shutdown_timeout_s
from replicas.process.cores import CoreDemand
from router.deployment import RouterDeployment

_DRAIN_LOOK_S = 0.5
"""How often Serve looks whether what drains is empty."""


def build(args: dict[str, Any]) -> Application:
    """Called by Serve with the application's `args`, while what is to be replaced still runs and answers.

    Raises RayServeException, which leaves that as it is: one line that names the key and the fix. Serve tries again after other
    exceptions, three times, and shows their traceback.
    """
    try:
        environment = read_environment()
        config = read_config(args)
        prove(config, environment.inherited)
    except ConfigError as error:
        raise RayServeException(str(error)) from error
    front, pools = needs_of(config)
    has_room = has_room_for([need for need in (*front, *pools) if need.deployment != ROUTER])
    return graph(config, environment.log_level, surge_percent=SURGE_PERCENT if has_room else 0)


def graph(config: ClusterConfig, log_level: str, *, surge_percent: int) -> Application:
    """All deployments, bound to each other; nothing is started."""
    pools = [pool for model in config.models for pool in model.pools]
    router_options = {"name": ROUTER, "ray_actor_options": {"num_cpus": ROUTER_CPUS}}
    names = frozenset(model.name for model in config.models)
    router = _shell(RouterDeployment).options(**router_options).bind(config.router, names, log_level)
    replicas = {
        model.name: {pool.role: _replicas(model, pool, pools, router, log_level, surge_percent) for pool in model.pools}
        for model in config.models
    }
    gateway = _shell(Gateway).options(
        name=GATEWAY,
        num_replicas=config.gateway.num_replicas,
        ray_actor_options={"num_cpus": config.gateway.num_cpus},
        max_surge_percent=surge_percent,
        graceful_shutdown_timeout_s=config.gateway.drain_s,
        graceful_shutdown_wait_loop_s=_DRAIN_LOOK_S,
    )
    targets = {model.name: model.targets for model in config.models}
    structured_output = {model.name: model.structured_output for model in config.models}
    return gateway.bind(config.gateway, router, replicas, targets, structured_output, log_level)


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
