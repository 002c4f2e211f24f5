"""Small engines of both pools that hand over in one process, behind the gateway's Backend and, if wanted, the real router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.failures import ReplicaDied, ReplicaGone
from cluster.generation.choice_streams import ChoiceStreams
from cluster.generation.prepared_generation import PreparedGeneration
from cluster.models.served_model import ServedModel
from cluster.settings.failover import FailoverPolicy
from cluster.telemetry.request_record import RequestRecord
from replicas.engine.async_engine import AsyncEngine
from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine.reporter import ReplicaIdentity, Reporter
from replicas.engine_config import EngineConfig, Role
from replicas.handoff.wiring import InProcessWiring
from replicas.request import GenerationRequest, RequestProgress
from replicas.sampling_params import SamplingParams
from replicas.text.tokenizer import Tokenizer
from router.config import RouterConfig
from router.live.async_router import AsyncRouter
from router.live.batch import PrefillEnded, ReplicaLost, RequestEnded
from router.policies.policy_choice import make_policy
from router.router import Router
from router.snapshot import Decision, Rejection, RoutingRequest
from tests.unit.direct_line import line_to
from tests.unit.fake_backend import FakeBackend

MODEL = "m"
ROLES: dict[str, Role] = {"p": "prefill", "p2": "prefill", "d": "decode", "d2": "decode"}
BLOCK_SIZE, MAX_NUM_SEQS = 8, 64


class EngineBackend(FakeBackend):
    """Pairs of the prefill replica `p` and a decode replica that is not excluded.

    A replica that `losses` names, by its id or by a request's id and its own role, is lost to whoever comes there next, after so
    many messages.
    """

    def __init__(self, replicas: dict[str, AsyncEngine]) -> None:
        super().__init__()
        self._replicas = replicas
        self.is_paired = True
        self.losses: dict[str | tuple[str, Role], tuple[int, type[ReplicaGone]]] = {}
        self.num_messages = 0
        self.leave_after: int | None = None
        """The client leaves when so many messages have come from all replicas."""
        self.has_left = asyncio.Event()

    def decide(self, request: RoutingRequest) -> Decision:
        decode_id = "d2" if "d" in request.excluded_replicas else "d"
        prefill_id = "p" if self.is_paired and not request.is_whole else None
        return Decision(request_id=request.request_id, replica_id=decode_id, replica_role="decode", prefill_replica_id=prefill_id)

    async def generate(
        self, model: str, replica_id: str, request: GenerationRequest, role: Role = "unified"
    ) -> AsyncGenerator[RequestProgress, None]:
        name = (request.request_id, role)
        num_left, loss = self.losses.pop(name if name in self.losses else replica_id, (-1, ReplicaDied))
        async with aclosing(self._replicas[replica_id].generate(request)) as stream:
            async for whole in stream:
                for progress in _parts(whole):
                    if num_left == 0:
                        raise loss(replica_id, "as told")
                    num_left -= 1
                    self.num_messages += 1
                    if self.num_messages == self.leave_after:
                        self.has_left.set()
                    yield progress


class RoutedBackend(EngineBackend):
    """The real router decides."""

    def __init__(self, replicas: dict[str, AsyncEngine], router: AsyncRouter) -> None:
        super().__init__(replicas)
        self.router = router
        self._line = line_to(router)

    async def close(self) -> None:
        await self._line.close()

    async def acquire(self, request: RoutingRequest) -> Decision | Rejection:
        self.routed.append(request)
        return await self._line.acquire(request)

    def release(self, request_id: str, num_output_tokens: int) -> None:
        super().release(request_id, num_output_tokens)
        self._line.tell(RequestEnded(request_id, num_output_tokens))

    def release_prefill(self, request_id: str) -> None:
        super().release_prefill(request_id)
        self._line.tell(PrefillEnded(request_id))

    def report_gone(self, replica_id: str) -> None:
        super().report_gone(replica_id)
        self._line.tell(ReplicaLost(replica_id))


def _parts(progress: RequestProgress) -> list[RequestProgress]:
    """A message for the offer of a prefill, and one for each token: how many came together is chance."""
    parts = [] if progress.handoff is None else [replace(progress, token_ids=(), logprobs=(), finish_reason=None)]
    num_bare = len(progress.token_ids) - len(progress.logprobs)
    for index, token_id in enumerate(progress.token_ids):
        logprobs = progress.logprobs[index - num_bare :][:1] if index >= num_bare else ()
        end = progress.finish_reason if index == len(progress.token_ids) - 1 else None
        parts.append(replace(progress, token_ids=(token_id,), logprobs=logprobs, handoff=None, finish_reason=end))
    return parts or [progress]


class Fleet:
    """Engines of every role with a gateway's choices over them."""

    def __init__(self, tokenizer: Tokenizer, kv_lease_s: float) -> None:
        """An offer that nobody takes keeps its blocks for `kv_lease_s`."""
        self.engines: dict[str, Engine] = {}
        self.replicas: dict[str, AsyncEngine] = {}
        self._tokenizer, self._kv_lease_s = tokenizer, kv_lease_s
        self.record = RequestRecord(request_id="a", method="POST", path="/v1/completions", started_s=0.0)

    async def start(self, folder: Path, stack: AsyncExitStack) -> None:
        wiring = InProcessWiring()
        for replica_id, role in ROLES.items():
            replica = AsyncEngine(lambda replica_id=replica_id, role=role: self._load(replica_id, role, folder, wiring))
            await replica.start()
            stack.push_async_callback(replica.shutdown)
            self.replicas[replica_id] = replica

    def _load(self, replica_id: str, role: Role, folder: Path, wiring: InProcessWiring) -> Engine:
        config = EngineConfig(
            model=str(folder), dtype="float32", runner="native", max_model_len=128, num_threads=1, max_num_batched_tokens=64,
            kv_cache_bytes=1 << 23, max_num_seqs=MAX_NUM_SEQS, block_size=BLOCK_SIZE, role=role, kv_lease_s=self._kv_lease_s,
        )  # fmt: skip
        self.engines[replica_id] = engine = load_engine(config, wiring)
        return engine

    async def answer(self, backend: FakeBackend, prompt: list[int], params: SamplingParams, name: str) -> list[list[int]]:
        """The tokens of each choice."""
        request = GenerationRequest(request_id=name, prompt_ids=tuple(prompt), params=params, seed=7)
        prepared = PreparedGeneration(response_id=name, model=MODEL, requests=(request,), params=params)
        model = ServedModel(MODEL, self.engines["d"].description, self._tokenizer, created_s=0)
        self.record = RequestRecord(request_id=name, method="POST", path="/v1/completions", started_s=0.0)
        tokens: list[list[int]] = [[] for _ in range(params.n)]
        async with ChoiceStreams(prepared, model, backend, FailoverPolicy(), self.record.see) as streams:
            async for delta in streams:
                tokens[delta.index] += delta.token_ids
                assert params.logprobs is None or [one.token_id for one in delta.logprobs] == list(delta.token_ids)
        return tokens

    async def wait_idle(self) -> None:
        """Every block is back."""
        async with asyncio.timeout(30):
            while any(
                engine.has_work or engine.scheduler.pool.num_free < engine.scheduler.pool.num_blocks for engine in self.engines.values()
            ):
                await asyncio.sleep(0.002)  # the engines' threads have no event to tell of it
        for engine in self.engines.values():
            engine.check()

    @asynccontextmanager
    async def routed(self) -> AsyncIterator[RoutedBackend]:
        """A router that takes turns within each pool, and hears of every replica."""
        config = RouterConfig(policy="round_robin")
        router = AsyncRouter(Router(config, make_policy(config)))
        router.start()

        async def push(report: Any) -> Any:
            return router.apply_report(report)

        reporters = []
        for replica_id, replica in self.replicas.items():
            identity = ReplicaIdentity(
                replica_id=replica_id, model=MODEL, block_size=BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS, role=ROLES[replica_id]
            )
            reporter = Reporter(identity, replica, push, interval_s=0.01)
            await reporter.report_once()
            reporters.append(asyncio.create_task(reporter.run()))
        backend = RoutedBackend(self.replicas, router)
        try:
            yield backend
        finally:
            await backend.close()
            for task in reporters:
                task.cancel()
            await asyncio.gather(*reporters, return_exceptions=True)
            await router.close()
