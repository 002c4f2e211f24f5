"""The cluster without Ray: real router, reporters and asynchronous engines in one event loop, over a fake model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI

from cluster.failures import ReplicaDied
from cluster.models.grammar_gate import GrammarGate
from cluster.models.model_registry import ModelRegistry
from cluster.protocols.dialect import Dialect
from cluster.protocols.dialects import DIALECTS
from cluster.settings.failover import FailoverPolicy
from cluster.settings.gateway_config import GatewayConfig
from cluster.settings.latency_targets import LatencyTarget
from cluster.telemetry.access_log import log_access
from cluster.telemetry.request_record import RequestRecord, RequestRecorder
from cluster.web.http_app import create_app
from replicas.engine.async_engine import AsyncEngine
from replicas.engine.reporter import ReplicaIdentity, Reporter
from replicas.engine_config import Role
from replicas.model_description import ModelDescription
from replicas.request import GenerationRequest, RequestProgress
from replicas.step_engine import EngineUnhealthy
from replicas.text.tokenizer import Tokenizer
from router.config import RouterConfig
from router.live.async_router import AsyncRouter
from router.live.batch import PrefillEnded, ReplicaLost, RequestEnded
from router.policies.policy_choice import make_policy
from router.router import Router
from router.snapshot import Decision, Rejection, RoutingRequest
from tests.unit.direct_line import line_to
from tests.unit.fake_engine import BLOCK_SIZE, EchoEngine

MODEL = "echo"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"

NO_RESTARTS = GatewayConfig(failover=FailoverPolicy(replica_timeout_s=1.0))
"""Nobody restarts a dead replica here, so waiting for one is short."""


class Replica:
    """One engine with its thread."""

    def __init__(self, replica_id: str, engine: EchoEngine) -> None:
        self.replica_id = replica_id
        self.engine = engine
        self.asynchronous = AsyncEngine(lambda: engine)


class InProcessBackend:
    """The gateway's Backend over engines of this process. Remembers what it was asked."""

    def __init__(self, router: AsyncRouter, replicas: dict[str, Replica]) -> None:
        self._router = router
        self._line = line_to(router)
        self.replicas = replicas  # replica id -> replica
        self.routed: list[RoutingRequest] = []
        self.sent: list[GenerationRequest] = []

    def start(self) -> None:
        return None

    async def close(self) -> None:
        await self._line.close()

    async def describe(self, model: str) -> ModelDescription:
        return next(iter(self.replicas.values())).engine.description

    async def acquire(self, request: RoutingRequest) -> Decision | Rejection:
        self.routed.append(request)
        return await self._line.acquire(request)

    async def generate(
        self, model: str, replica_id: str, request: GenerationRequest, role: Role = "unified"
    ) -> AsyncGenerator[RequestProgress, None]:
        self.sent.append(request)
        stream = self.replicas[replica_id].asynchronous.generate(request)
        try:
            async for progress in stream:
                yield progress
        except EngineUnhealthy as error:
            raise ReplicaDied(replica_id, str(error)) from error
        finally:
            await stream.aclose()

    async def wait_hung(self, replica_id: str) -> None:
        await asyncio.Event().wait()

    def release(self, request_id: str, num_output_tokens: int) -> None:
        self._line.tell(RequestEnded(request_id, num_output_tokens))

    def release_prefill(self, request_id: str) -> None:
        self._line.tell(PrefillEnded(request_id))

    def report_gone(self, replica_id: str) -> None:
        self._line.tell(ReplicaLost(replica_id))

    async def num_serving(self) -> dict[str, int]:
        return self._router.num_serving()

    async def describe_router(self) -> dict[str, Any]:
        return self._router.describe()

    async def explain(self, request_id: str) -> list[Decision | Rejection]:
        return self._router.explain(request_id)


@dataclass(slots=True)
class InProcessCluster:
    """What a test may touch."""

    app: FastAPI
    backend: InProcessBackend
    replicas: list[Replica]
    records: list[RequestRecord]
    add_replica: Callable[[], Awaitable[Replica]]
    """Starts one more, and returns when the router knows it."""

    async def wait_idle(self, timeout_s: float = 30.0) -> None:
        """Returns when no engine has a request or holds a block. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while any(each.engine.has_work or each.engine.pool.num_free != each.engine.pool.num_blocks for each in self.replicas):
                await asyncio.sleep(0.002)  # the engines' threads have no event to tell of it
        for replica in self.replicas:
            replica.engine.pool.check()


@asynccontextmanager
async def running_cluster(
    tokenizer: Tokenizer,
    *,
    config: GatewayConfig | None = None,
    router_config: RouterConfig | None = None,
    num_replicas: int = 1,
    make_engine: Callable[[], EchoEngine] | None = None,
    dialects: Sequence[Dialect] = DIALECTS,
    targets: Sequence[LatencyTarget] = (),
    grammars: GrammarGate | None = None,
) -> AsyncIterator[InProcessCluster]:
    """A gateway application over `num_replicas` echo engines, all running until the context ends."""
    router_config = router_config or RouterConfig()
    router = AsyncRouter(Router(router_config, make_policy(router_config)))
    router.start()

    def new_engine() -> EchoEngine:
        return EchoEngine(eos_token_id=min(tokenizer.eos_token_ids), vocab_size=tokenizer.vocab_size)

    replicas: list[Replica] = []
    tasks = []

    async def push(report: Any) -> Any:
        return router.apply_report(report)

    async with AsyncExitStack() as stack:
        backend = InProcessBackend(router, {})

        async def add_replica() -> Replica:
            replica = Replica(f"replica-{len(replicas)}", (make_engine or new_engine)())
            await replica.asynchronous.start()
            stack.push_async_callback(replica.asynchronous.shutdown)
            identity = ReplicaIdentity(
                replica_id=replica.replica_id,
                model=MODEL,
                block_size=BLOCK_SIZE,
                max_num_seqs=replica.engine.scheduler.config.max_num_seqs,
            )
            reporter = Reporter(identity, replica.asynchronous, push, interval_s=0.01)
            replicas.append(replica)
            backend.replicas[replica.replica_id] = replica
            await reporter.report_once()
            tasks.append(asyncio.create_task(reporter.run()))
            return replica

        for _ in range(num_replicas):
            await add_replica()
        gates = {} if grammars is None else {MODEL: grammars}
        models = ModelRegistry([MODEL], backend, targets={MODEL: targets}, grammars=gates, load_tokenizer=lambda source: tokenizer)
        records: list[RequestRecord] = []
        app = create_app(backend, config or NO_RESTARTS, models, lambda: RequestRecorder(log_access, records.append), dialects=dialects)
        await models.get(MODEL)
        try:
            yield InProcessCluster(app, backend, replicas, records, add_replica)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await models.close()
            await backend.close()
            await router.close()


@asynccontextmanager
async def client_of(cluster: InProcessCluster) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(cluster.app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON payloads of a stream that ended well."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
