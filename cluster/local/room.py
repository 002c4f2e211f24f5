"""Whether this machine can ever hold what a config wants: Serve itself would wait for it without end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cluster.local.preflight import LaunchError
from cluster.serve.needs import Need, needs_of, why_no_room
from cluster.settings.config import ClusterConfig


def check_room(config: Mapping[str, Any], clusters: Sequence[ClusterConfig], machine: Mapping[str, float]) -> None:
    """Raises LaunchError with settings that fit. `clusters` are the args of our applications in the Serve config `config`; `machine` has
    all resources of the only node."""
    changes = {
        change["name"]: change
        for application in config["applications"]
        if isinstance(application, Mapping)
        for change in application.get("deployments") or ()
        if isinstance(change, Mapping) and "name" in change
    }
    needs = [needs_of(cluster) for cluster in clusters]
    front = [changed(need, changes.get(need.deployment, {})) for some, _ in needs for need in some]
    pools = [changed(need, changes.get(need.deployment, {})) for _, some in needs for need in some]
    if (reason := why_no_room(front, pools, machine)) is not None:
        raise LaunchError(reason)


def changed(need: Need, change: Mapping[str, Any]) -> Need:
    """With what Serve's own section for the deployment says; of replicas that scale, the fewest."""
    num_replicas = change.get("num_replicas")
    if num_replicas == "auto" or change.get("autoscaling_config"):
        num_replicas = (change.get("autoscaling_config") or {}).get("min_replicas", 1)
    options = change.get("ray_actor_options") or {}
    bundle = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus")}
    return replace(
        need,
        num_replicas=num_replicas if isinstance(num_replicas, int) else need.num_replicas,
        bundle={**need.bundle, **{name: float(amount) for name, amount in bundle.items() if amount is not None}},
    )


def machine_resources() -> dict[str, float]:
    """Resources that Ray will count on this machine when it starts: "CPU", and "GPU" if there are any."""
    from ray._private.resource_and_label_spec import ResourceAndLabelSpec  # takes seconds; no public API tells before the start

    found: dict[str, float] = ResourceAndLabelSpec().resolve(is_head=True, node_ip_address="127.0.0.1").to_resource_dict()
    return found
