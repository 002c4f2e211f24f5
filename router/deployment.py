"""The Serve shell of the router: one actor that gateways ask and replicas report to."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray import serve

from replicas.logs import start_logging
from replicas.stats import ReplicaReport, ReportReply
from router.async_router import AsyncRouter
from router.config import RouterConfig
from router.liveness import LivenessMonitor
from router.policy_choice import make_policy
from router.router import Router
from router.snapshot import Decision, Rejection, RoutingRequest

# More than any queue limit: Serve must never queue for us, because it cannot order by priority or fairness.
MAX_ONGOING_REQUESTS = 1_000_000


@serve.deployment(
    num_replicas=1,
    max_ongoing_requests=MAX_ONGOING_REQUESTS,
    health_check_period_s=1.0,
    health_check_timeout_s=10.0,
    graceful_shutdown_timeout_s=2.0,
    logging_config={"enable_access_log": False},  # a line for every report would drown everything else
)
class RouterDeployment:
    """Its state is rebuilt from the replicas' reports after a restart."""

    async def __init__(self, config: RouterConfig, log_level: str) -> None:  # type: ignore[misc]  # Serve awaits it
        start_logging(log_level)
        self._router = AsyncRouter(Router(config, make_policy(config)))
        self._router.start()
        self._liveness = LivenessMonitor(_living_replicas, self._router.remove_replica)
        self._monitor = asyncio.create_task(self._liveness.run(), name="liveness")

    async def acquire(self, request: RoutingRequest) -> Decision | Rejection:
        return await self._router.acquire(request)

    async def release(self, request_id: str, num_output_tokens: int) -> None:
        self._router.release(request_id, num_output_tokens)

    async def report(self, report: ReplicaReport) -> ReportReply:
        self._liveness.hear(report.replica_id)
        return self._router.apply_report(report)

    async def remove_replica(self, replica_id: str) -> None:
        self._liveness.forget(replica_id)
        self._router.remove_replica(replica_id)

    async def describe(self) -> dict[str, Any]:
        return self._router.describe()

    async def check_health(self) -> None:
        """Raises RuntimeError when nobody would be answered, or the dead no longer be noticed."""
        self._router.check_health()
        if self._monitor.done():
            raise RuntimeError(f"the liveness monitor has stopped: {self._monitor.exception()!r}")


async def _living_replicas() -> frozenset[str]:
    """Ray forgets an actor's name when the actor dies; Serve's names end with the replica's unique id."""
    actors = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
    return frozenset(actor["name"].rsplit("#", 1)[-1] for actor in actors)
