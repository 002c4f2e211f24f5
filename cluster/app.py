"""The whole cluster on one screen: gateways ask the router, then stream from the replicas that it names."""

from __future__ import annotations

import re
from typing import Any

from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig

from cluster.config import ClusterConfig, ModelConfig, read_config, read_environment
from cluster.gateway import Gateway
from cluster.targeted_dispatch import TargetedDispatch
from replicas.deployment import ReplicaDeployment
from router.deployment import RouterDeployment


def build(args: dict[str, Any]) -> Application:
    """Called by Serve with the application's `args`. Raises ConfigError: one line that names the key and the fix."""
    config, log_level = read_config(args), read_environment().log_level
    router = _shell(RouterDeployment).options(name="router", ray_actor_options={"num_cpus": 0.1}).bind(config.router, log_level)
    replicas = {model.name: _replicas(model, config, router, log_level) for model in config.models}
    gateway = _shell(Gateway).options(
        name="gateway", num_replicas=config.gateway.num_replicas, ray_actor_options={"num_cpus": config.gateway.num_cpus}
    )
    return gateway.bind(config.gateway, router, replicas, log_level)


def _replicas(model: ModelConfig, config: ClusterConfig, router: Application, log_level: str) -> Application:
    deployment = _shell(ReplicaDeployment).options(
        name=f"replica-{re.sub(r'[^A-Za-z0-9_.-]', '-', model.name)}",
        num_replicas=model.num_replicas,
        ray_actor_options={"num_cpus": model.num_cpus, "num_gpus": model.num_gpus},
        request_router_config=RequestRouterConfig(request_router_class=TargetedDispatch),
    )
    num_replicas_in_all = sum(each.num_replicas for each in config.models)
    return deployment.bind(model.name, model.engine, num_replicas_in_all, router, log_level)


def _shell(deployment: Any) -> Deployment:
    """What `serve.deployment` made of a class; type checkers still see the class."""
    return deployment
