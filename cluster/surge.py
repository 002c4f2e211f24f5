"""Whether a redeploy may start successors before it stops what runs. Serve waits for their resources for ever if told to."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import ray
from ray.util.placement_group import placement_group, remove_placement_group

logger = logging.getLogger(__name__)

SURGE_PERCENT = 1
"""Of the replicas, rounded up: one more than wanted for up to a hundred of them."""
_PROBE_TIMEOUT_S = 3.0


def has_room_for(needs: Sequence[Mapping[str, float]]) -> bool:
    """Whether the cluster can hold one more of each of these beside what it holds now, as its own scheduler says.

    Asked at the redeploy itself, when what is to be replaced still runs. Without room the old ones are stopped first, and
    their streams wait for the new ones.
    """
    if not ray.is_initialized():
        return False
    bundles = [{name: amount for name, amount in need.items() if amount > 0} for need in needs]
    probe = placement_group([bundle for bundle in bundles if bundle], strategy="PACK")
    try:
        has_room = bool(probe.wait(_PROBE_TIMEOUT_S))
    finally:
        remove_placement_group(probe)
    logger.info(
        "a redeploy %s", "starts new replicas before it stops old ones" if has_room else "has no room for old and new replicas at once"
    )
    return has_room
