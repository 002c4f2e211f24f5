"""A Backend whose router and replicas do as told, and that remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Any

from cluster.failures import ReplicaGone, ReplicaLeft
from replicas.engine_config import Role
from replicas.model_description import ModelDescription
from replicas.request import GenerationRequest, RequestProgress
from router.snapshot import Decision, Rejection, RoutingRequest


class FakeBackend:
    """Its router always names the replica `only`, which takes nothing. Tests change what they are about."""

    def __init__(self) -> None:
        self.routed: list[RoutingRequest] = []
        self.gone: list[str] = []
        self.released: list[str] = []
        self.prefills_released: list[str] = []
        self.hung: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """Set for a replica that the router has fenced."""

    @property
    def acquired(self) -> list[str]:
        return [request.request_id for request in self.routed]

    def decide(self, request: RoutingRequest) -> Decision:
        return Decision(request_id=request.request_id, replica_id="only")

    async def describe(self, model: str) -> ModelDescription:
        raise ReplicaGone("any", "not asked for here")

    async def acquire(self, request: RoutingRequest) -> Decision | Rejection:
        self.routed.append(request)
        return self.decide(request)

    async def generate(
        self, model: str, replica_id: str, request: GenerationRequest, role: Role = "unified"
    ) -> AsyncGenerator[RequestProgress, None]:
        for progress in ():
            yield progress
        raise ReplicaLeft(replica_id, "it drains")

    async def wait_hung(self, replica_id: str) -> None:
        await self.hung[replica_id].wait()

    def release(self, request_id: str, num_output_tokens: int) -> None:
        self.released.append(request_id)

    def release_prefill(self, request_id: str) -> None:
        self.prefills_released.append(request_id)

    def report_gone(self, replica_id: str) -> None:
        self.gone.append(replica_id)

    async def num_serving(self) -> dict[str, int]:
        return {}

    async def describe_router(self) -> dict[str, Any]:
        return {}

    async def explain(self, request_id: str) -> list[Decision | Rejection]:
        return []

    def start(self) -> None:
        return None

    async def close(self) -> None:
        return None
