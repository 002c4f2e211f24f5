"""Starts the ranks above 0 of a replica as Ray actors."""

from __future__ import annotations

from typing import Any

import ray
from ray.util import get_current_placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from replicas.process.cores import try_claim_cores
from replicas.ranks.channel import RankAddress
from replicas.ranks.launcher import LaunchedRank
from replicas.serve.object_store import object_store_transport


class RayLauncher:
    """Starts ranks as actors in this replica's placement group, one per bundle. The replica's actor owns them: they end with it."""

    shows_all_devices = False

    def __init__(self) -> None:
        """Called in the replica's actor. Raises ValueError if its deployment has no placement group."""
        group = get_current_placement_group()
        if group is None:
            raise ValueError("tensor_parallel_size above 1 needs a placement group; deploy through cluster.app, which asks for it")
        self._group = group
        nodes = set(placement_group_table(group)["bundles_to_node_id"].values())
        self.host = "127.0.0.1" if len(nodes) == 1 else ray.util.get_node_ip_address()

    def launch(self, address: RankAddress, num_threads: int) -> LaunchedRank:
        bundle = self._group.bundle_specs[address.rank]
        actor = ray.remote(_RankActor).options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=address.rank),
        )
        return _RayRank(actor.remote(), address, num_threads)


class _RankActor:
    def run(self, address: RankAddress, num_threads: int) -> None:
        claim = try_claim_cores(num_threads)
        if claim is not None:
            claim.pin_thread()
        from replicas.ranks.rank_process import run_rank

        run_rank(address, extra_transports=(object_store_transport,))


class _RayRank:
    def __init__(self, actor: Any, address: RankAddress, num_threads: int) -> None:
        self._actor, self._end = actor, actor.run.remote(address, num_threads)

    def why_ended(self) -> str | None:
        ended, _ = ray.wait([self._end], timeout=0)
        if not ended:
            return None
        try:
            ray.get(self._end)
        except ray.exceptions.RayError as error:
            return str(error).strip().splitlines()[0]
        return "it was told to stop"

    def kill(self) -> None:
        ray.kill(self._actor)
