"""The Serve shell of the router: one actor that gateways ask and replicas report to."""

from __future__ import annotations

from typing import Any

from ray import serve

from replicas.logs import start_logging
from replicas.stats import ReplicaReport, ReportReply
from router.async_router import AsyncRouter
from router.config import RouterConfig
from router.policy_choice import make_policy
from router.router import Router
from router.snapshot import Decision, Rejection, RoutingRequest

# More than any queue limit: Serve must never queue for us, because it cannot order by priority or fairness.
MAX_ONGOING_REQUESTS = 1_000_000


@serve.deployment(
    num_replicas=1,
    max_ongoing_requests=MAX_ONGOING_REQUESTS,
    health_check_period_s=1.0,
    graceful_shutdown_timeout_s=2.0,
    logging_config={"enable_access_log": False},  # a line for every report would drown everything else
)
class RouterDeployment:
    """Its state is rebuilt from the replicas' reports after a restart."""

    async def __init__(self, config: RouterConfig, log_level: str) -> None:  # type: ignore[misc]  # Serve awaits it
        start_logging(log_level)
        self._router = AsyncRouter(Router(config, make_policy(config)))
        self._router.start()

    async def acquire(self, request: RoutingRequest) -> Decision | Rejection:
        return await self._router.acquire(request)

    async def release(self, request_id: str, num_output_tokens: int) -> None:
        self._router.release(request_id, num_output_tokens)

    async def report(self, report: ReplicaReport) -> ReportReply:
        return self._router.apply_report(report)

    async def remove_replica(self, replica_id: str) -> None:
        self._router.remove_replica(replica_id)

    async def describe(self) -> dict[str, Any]:
        return self._router.describe()

    async def check_health(self) -> None:
        self._router.check_health()
