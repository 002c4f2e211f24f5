"""Whether a redeploy may start successors before it stops what runs. Serve waits for their resources for ever if told to."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from cluster.serve.needs import Need

logger = logging.getLogger(__name__)

SURGE_PERCENT = 1
"""Share of the replicas, rounded up: one more than wanted for up to a hundred of them."""
_SERVE_REPLICA = "SERVE_REPLICA::"
"""Begins the name of each replica's actor: SERVE_REPLICA::application#deployment#id (Ray 2.60)."""
_PROBE_TIMEOUT_S = 3.0


def num_successors(need: Need, num_running: int) -> int:
    """Replicas that Serve starts at once beside `num_running` old ones when it surges: those that are missing anyway, too."""
    surge = -(-SURGE_PERCENT * need.num_replicas // 100)
    return min(need.num_replicas, surge + max(0, need.num_replicas - num_running))


def has_room_for(needs: Sequence[Need]) -> bool:
    """Whether the cluster can hold the first successors of all deployments beside what it holds now, as its own scheduler says.

    Asked at the redeploy itself, when what is to be replaced still runs. Without room the old ones are stopped first, and
    their streams wait for the new ones. False where nothing runs yet.
    """
    if not ray.is_initialized():
        return False
    running = num_replicas(actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True))
    if not any(running[need.deployment] for need in needs):
        return False
    bundles = [
        {name: amount for name, amount in need.bundle.items() if amount > 0}
        for need in needs
        for _ in range(need.num_actors * num_successors(need, running[need.deployment]))
    ]
    probe = placement_group([bundle for bundle in bundles if bundle], strategy="PACK")
    try:
        has_room = bool(probe.wait(_PROBE_TIMEOUT_S))
    finally:
        remove_placement_group(probe)
    logger.info(
        "a redeploy %s", "starts new replicas before it stops old ones" if has_room else "has no room for old and new replicas at once"
    )
    return has_room


def num_replicas(actor_names: Iterable[str]) -> Counter[str]:
    """Deployment -> its replicas of whichever version, those that still drain too. Serve's own status has none during a build."""
    return Counter(name.split("#")[-2] for name in actor_names if name.startswith(_SERVE_REPLICA) and name.count("#") >= 2)
