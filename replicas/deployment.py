"""The Serve shell of a replica: one engine, its reports to the router and its metrics."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import ray
from ray import serve

from replicas.engine.async_engine import AsyncEngine
from replicas.engine.metrics import EngineMetrics
from replicas.engine.reporter import ReplicaIdentity, Reporter, report_interval_s
from replicas.engine_config import LOOPBACK, EngineConfig
from replicas.model_description import ModelDescription
from replicas.process.cores import CoreClaim, CoreDemand, threads_of_engine, try_claim_cores
from replicas.process.cpu_quota import num_usable_cores
from replicas.process.heap import freeze_heap
from replicas.process.logs import start_logging
from replicas.request import GenerationRequest, RequestProgress, StepOutput
from replicas.serve.handles import over_grpc
from replicas.serve.metric_sink import RayMetricSink
from replicas.serve.object_store import object_store_transport
from replicas.serve.rank_launcher import RayLauncher
from replicas.stats import ReplicaReport, ReplicaStats, ReportReply
from replicas.step_engine import StepEngine

logger = logging.getLogger(__name__)

# More than any queue limit: the router limits a replica's requests, and Serve must neither reject nor queue them.
MAX_ONGOING_REQUESTS = 1_000_000
METRICS_INTERVAL_S = 1.0
DRAIN_POLL_S = 0.1
DRAIN_MARGIN_S = 10.0
"""Time from the end of a drain, when running requests are handed back to their gateways, to Serve's kill."""
HOLD_MARGIN_S = 2.0
"""Time from the end of the last wait for leases to Serve's kill."""
SWITCH_INTERVAL_S = 0.0005
"""Python's thread switch interval: between two native calls the engine thread must not wait 5 ms for the event loop."""


@serve.deployment(
    max_ongoing_requests=MAX_ONGOING_REQUESTS,
    health_check_period_s=1.0,
    health_check_timeout_s=10.0,
    max_constructor_retry_count=2,  # a load that fails is far more often a wrong setting than bad luck
    logging_config={"enable_access_log": False},  # the gateway's access log has every request
)
class ReplicaDeployment:
    """Serves one model. Token ids in, token ids out; closing a stream cancels its request."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        model: str,
        config: EngineConfig,
        num_replicas: int,
        demand: CoreDemand,
        drain_s: float,
        router: Any,
        log_level: str,
    ) -> None:
        """`num_replicas` counts every replica of the application, which share the router's time; `demand` is their total.
        Requests may run until `drain_s` after Serve asks the replica to stop."""
        start_logging(log_level)
        self._is_stopping = _stop_signal()
        self._config = replace(
            config, num_threads=_num_threads(config.num_threads, demand), transfer_host=_transfer_host(config.transfer_host)
        )
        self._hold_until_s = math.inf
        self._shutdown_s = shutdown_timeout_s(drain_s, config)
        self._claim: CoreClaim | None = None
        self._launcher = RayLauncher() if config.tensor_parallel_size > 1 else None
        self._check_ranks: Callable[[], None] = lambda: None
        self._description: ModelDescription | None = None
        replica_id = serve.get_replica_context().replica_id.unique_id
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._engine = AsyncEngine(self._load, on_step=self._note_step)
        await self._engine.start()
        description = await self.describe()
        # The runner is a tag, so that an alert can count requests on a slower path.
        tags = {
            "model": model, "replica": replica_id, "role": config.role, "runner": description.runner,
            "quantization": description.quantization,
        }  # fmt: skip
        self._metrics = EngineMetrics(RayMetricSink(tags))
        identity = ReplicaIdentity(
            replica_id=replica_id,
            model=model,
            block_size=description.block_size,
            max_num_seqs=self._config.max_num_seqs,
            role=config.role,
        )

        router = over_grpc(router)

        async def push(report: ReplicaReport) -> ReportReply:
            return await router.report.remote(report)  # type: ignore[no-any-return]

        interval_s = report_interval_s(num_replicas)
        reporter = Reporter(identity, self._engine, push, interval_s=interval_s, is_draining=self._is_stopping)
        self._tasks = [
            asyncio.create_task(self._drain(replica_id, drain_s), name="drain"),
            asyncio.create_task(reporter.run(), name="reporter"),
            asyncio.create_task(self._export_metrics(), name="metrics"),
        ]
        logger.info("replica %s serves %s (%s): %s", replica_id, model, config.role, description)

    def _load(self) -> StepEngine:
        """Runs in the engine's thread: only there torch is imported, and the threads that OpenMP starts inherit its cores."""
        assert self._config.num_threads is not None
        self._claim = try_claim_cores(self._config.num_threads)
        if self._claim is None:
            logger.warning("this machine does not have %d unclaimed cores: this replica shares cores", self._config.num_threads)
        else:
            self._claim.pin_thread()
            logger.info("computes on cores %s", ", ".join(map(str, self._claim.cores)))
        from replicas.engine.loader import load_engine
        from replicas.handoff.wiring import RemoteWiring

        wiring = None if self._config.role == "unified" else RemoteWiring(extra_transports=(object_store_transport,))
        engine = load_engine(self._config, wiring, self._launcher)
        self._description = engine.description
        self._check_ranks = engine.check_ranks
        engine.warm_up_grammars()
        freeze_heap()
        return engine

    def _note_step(self, output: StepOutput) -> None:
        self._metrics.note_step(output)

    async def describe(self) -> ModelDescription:
        assert self._description is not None, "the engine has loaded before any call arrives"
        return self._description

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestProgress, None]:
        """Streams one choice, coalesced. Raises RequestRejected, EngineUnhealthy."""
        logger.debug("request %s choice %d attempt %d begins", request.request_id, request.choice, request.attempt)
        async with aclosing(self._engine.generate(request)) as stream:
            async for progress in stream:
                yield progress

    async def stats(self) -> ReplicaStats:
        """Load and counters as of the end of the last step."""
        return self._engine.stats()

    async def cancel(self, request_id: str) -> int:
        """Cancels every choice of a request; returns how many were running."""
        return self._engine.cancel(request_id)

    async def _drain(self, replica_id: str, drain_s: float) -> None:
        """Waits until Serve stops the replica; the next report tells the router, which sends no more requests. Requests still
        running after `drain_s` end here as cancelled, and their gateways continue them on another replica, before Serve's kill."""
        while not self._is_stopping():  # noqa: ASYNC110 - Serve has a flag, and no event
            await asyncio.sleep(DRAIN_POLL_S)
        self._hold_until_s = asyncio.get_running_loop().time() + self._shutdown_s - HOLD_MARGIN_S
        logger.info("replica %s drains: requests may end here for %.0f s", replica_id, drain_s)
        await asyncio.sleep(drain_s)
        while True:  # repeated: a request may still have been on its way
            if num := self._engine.cancel_all():
                logger.info("replica %s hands %d requests back, to be continued elsewhere", replica_id, num)
            await asyncio.sleep(DRAIN_POLL_S)

    def check_health(self) -> None:
        """Raises EngineUnhealthy if the engine makes no progress, RankLost if a rank died or hangs, RuntimeError if a background
        task (drain, reports, metrics) has stopped."""
        self._engine.check_health()
        self._check_ranks()
        for task in self._tasks:
            if task.done():
                raise RuntimeError(f"the {task.get_name()} of this replica has stopped: {task.exception()!r}")

    async def _export_metrics(self) -> None:
        """Exports even without changes: Ray drops gauges that are not set again."""
        while True:
            self._metrics.export(self._engine.stats())
            await asyncio.sleep(METRICS_INTERVAL_S)

    async def _hold_leases(self) -> None:
        """Waits until no other replica may read KV here: Serve ends a replica once its streams have ended, but its offered KV may
        still be read. Returns when all leases have ended or Serve's time is nearly up."""
        hold_s = min(self._shutdown_s, self._hold_until_s - asyncio.get_running_loop().time())
        if self._engine.stats().handoffs.num_leases:
            logger.info("%d handoffs may still be read here, for %.0f s at most", self._engine.stats().handoffs.num_leases, hold_s)
            if num_left := await self._engine.wait_leases_ended(hold_s):
                logger.warning("%d handoffs were not read in time; their receivers compute the KV", num_left)

    async def __del__(self) -> None:
        if hasattr(self, "_tasks"):
            await self._hold_leases()
        for task in getattr(self, "_tasks", ()):
            task.cancel()
        await self._engine.shutdown()


def _stop_signal() -> Callable[[], bool]:
    """A function that tells whether Serve has begun to stop this replica. Serve has no public API for it: it waits for running
    requests and then calls the destructor, which is too late. Raises RuntimeError if this version of Serve has no such flag."""
    worker = ray._private.worker.global_worker
    replica: Any = getattr(worker.actors.get(worker.actor_id), "_replica_impl", None)
    if not isinstance(getattr(replica, "_shutting_down", None), bool):
        raise RuntimeError("this version of Ray Serve does not tell when a replica is stopped; install the pinned requirements.txt")
    return lambda: bool(replica._shutting_down)


def shutdown_timeout_s(drain_s: float, config: EngineConfig) -> float:
    """Seconds that Serve must wait before it kills a stopping replica: requests end or move, then leases end."""
    return drain_s + DRAIN_MARGIN_S + (0.0 if config.role == "unified" else config.kv_lease_s + HOLD_MARGIN_S)


def _transfer_host(wanted: str) -> str:
    """The node's address in place of the default: replicas on other nodes, also on nodes that join later, must reach it."""
    return str(ray.util.get_node_ip_address()) if wanted in (LOOPBACK, "localhost") else wanted


def _num_threads(wanted: int | None, demand: CoreDemand) -> int:
    """Threads of this engine. Raises ValueError if all engines together want more cores than the cluster's nodes have."""
    num_nodes = max(1, sum(bool(node["Alive"]) for node in ray.nodes()))
    return threads_of_engine(wanted, demand, num_cores=num_usable_cores(), num_machines=num_nodes)
