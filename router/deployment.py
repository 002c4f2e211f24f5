"""The Serve shell of the router: one actor that gateways ask and replicas report to."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.util import metrics

from replicas.engine.reporter import longest_silence_s
from replicas.process.heap import freeze_heap
from replicas.process.logs import start_logging
from replicas.stats import ReplicaReport, ReportReply
from router.config import RouterConfig
from router.live.async_router import AsyncRouter
from router.live.attentive_clock import AttentiveClock
from router.live.batch import Answers, Batch, ReplicaLost
from router.live.caller_leases import CallerLeases
from router.live.fences import FenceNews, Fences
from router.live.liveness import LivenessMonitor
from router.live.router_metrics import COUNTERS, GAUGES, RouterMetrics
from router.policies.policy_choice import make_policy
from router.router import Router
from router.snapshot import Decision, Rejection

logger = logging.getLogger(__name__)

# More than any queue limit: Serve must never queue for us, because it cannot order by priority or fairness.
MAX_ONGOING_REQUESTS = 1_000_000
VIGIL_INTERVAL_S = 0.25
METRICS_INTERVAL_S = 1.0
RENEWAL_S = 1.0
"""How long a caller's renewal is held while there is no news for it: so often it renews. A wait for answers is held as long."""
REPORTS_MISSED = 5


@serve.deployment(
    num_replicas=1,
    max_ongoing_requests=MAX_ONGOING_REQUESTS,
    health_check_period_s=1.0,
    health_check_timeout_s=4.0,  # three in a row: a router that hangs is replaced after about 12 s
    graceful_shutdown_timeout_s=2.0,
    graceful_shutdown_wait_loop_s=0.1,
    logging_config={"enable_access_log": False},  # a line for every report would drown everything else
)
class RouterDeployment:
    """Its state is rebuilt from the replicas' reports after a restart."""

    async def __init__(self, config: RouterConfig, models: frozenset[str], log_level: str) -> None:  # type: ignore[misc]  # Serve awaits it
        """`models` are those of the configuration."""
        start_logging(log_level)
        self._config = config
        self._router = AsyncRouter(Router(config, make_policy(config), served=models))
        self._router.start()
        self._clock = AttentiveClock(interval_s=VIGIL_INTERVAL_S)
        self._fences = Fences()
        self._callers = CallerLeases(config.caller_lease_s, self._clock)
        self._liveness = LivenessMonitor(
            _living_replicas, self._router.remove_replica, self._fence, self._clock, hang_s=lambda: self._hang_s
        )
        self._tasks = [
            asyncio.create_task(self._keep_vigil(), name="vigil"),
            asyncio.create_task(self._bury(), name="liveness monitor"),
            asyncio.create_task(self._export_metrics(), name="metrics"),
        ]
        freeze_heap()

    async def deliver(self, batch: Batch) -> Answers:
        """What a gateway has to tell and to ask. Answers at once: what has to wait comes by `wait_answers`."""
        for notice in batch.notices:
            if isinstance(notice, ReplicaLost):
                self._liveness.forget(notice.replica_id)
            self._router.note(notice)
        return await self._router.decide(batch.caller, batch.requests)

    async def wait_answers(self, caller: str) -> Answers:
        return await self._router.wait_answers(caller, RENEWAL_S)

    async def renew(self, caller: str, seen_version: int) -> FenceNews:
        """A gateway lives. Answers at once when it has not seen the replicas that are fenced now, else after RENEWAL_S."""
        self._callers.renew(caller)
        return await self._fences.wait_changed(seen_version, RENEWAL_S)

    async def report(self, report: ReplicaReport) -> ReportReply:
        self._liveness.hear(report.replica_id, report.model)
        reply = self._router.apply_report(report)
        return replace(reply, dead_callers=self._callers.dead_among(report.callers))

    async def num_serving(self) -> dict[str, int]:
        """Model -> replicas that can take requests."""
        return self._router.num_serving()

    async def describe(self) -> dict[str, Any]:
        return self._router.describe()

    async def explain(self, request_id: str) -> list[Decision | Rejection]:
        return self._router.explain(request_id)

    async def check_health(self) -> None:
        """Raises RuntimeError when nobody would be answered, or the dead no longer be noticed."""
        self._router.check_health()
        for task in self._tasks:
            if task.done():
                raise RuntimeError(f"the {task.get_name()} of the router has stopped: {task.exception()!r}")

    @property
    def _hang_s(self) -> float:
        return max(self._config.hang_timeout_s, REPORTS_MISSED * longest_silence_s(self._liveness.num_known))

    def _fence(self, replica_ids: frozenset[str]) -> None:
        self._router.set_fenced(replica_ids)
        self._fences.set(replica_ids)

    async def _keep_vigil(self) -> None:
        while True:
            await asyncio.sleep(VIGIL_INTERVAL_S)
            self._clock.tick()
            self._liveness.check_silence()
            for caller in self._callers.take_expired():
                logger.warning("%s is dead: %d requests of it are given up", caller, self._router.release_caller(caller))

    async def _export_metrics(self) -> None:
        """Again and again: Ray forgets gauges that are not set."""
        router_metrics = RouterMetrics(_RayMetricSink())
        while True:
            router_metrics.export(self._router.statistics())
            await asyncio.sleep(METRICS_INTERVAL_S)

    async def _bury(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL_S)
            await self._liveness.check_deaths()


class _RayMetricSink:
    """The router's metrics on Ray's metrics agent."""

    def __init__(self) -> None:
        self._gauges = {name: metrics.Gauge(name, text, tag_keys=_tag_keys(tag)) for name, (text, tag) in GAUGES.items()}
        self._counters = {name: metrics.Counter(name, text, tag_keys=_tag_keys(tag)) for name, (text, tag) in COUNTERS.items()}

    def set_gauge(self, name: str, model: str, tag: str, value: float) -> None:
        self._gauges[name].set(value, _tags(GAUGES[name][1], model, tag))

    def add_counter(self, name: str, model: str, tag: str, value: float) -> None:
        self._counters[name].inc(value, _tags(COUNTERS[name][1], model, tag))


def _tag_keys(own: str) -> tuple[str, ...]:
    return ("model", own) if own else ("model",)


def _tags(own: str, model: str, value: str) -> dict[str, str]:
    return {"model": model, own: value} if own else {"model": model}


async def _living_replicas() -> frozenset[str]:
    """Ray forgets an actor's name when the actor dies; Serve's names end with the replica's unique id."""
    actors = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
    return frozenset(actor["name"].rsplit("#", 1)[-1] for actor in actors)
