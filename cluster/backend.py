"""The rest of the cluster as the gateway needs it. Serve implements it with actors, tests with an engine in process."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from replicas.engine_config import Role
from replicas.model_description import ModelDescription
from replicas.request import GenerationRequest, RequestProgress
from router.snapshot import Decision, Rejection, RoutingRequest


class Backend(Protocol):
    """Routes and runs requests. Every `acquire` is followed by one `release`, whatever came of it."""

    def start(self) -> None:
        """Begins to renew this caller's lease; needs a running loop."""
        ...

    async def close(self) -> None: ...

    async def describe(self, model: str) -> ModelDescription:
        """Facts of a model's engines; waits until one replica, of whatever pool, has loaded. Raises ReplicaGone."""
        ...

    async def acquire(self, request: RoutingRequest) -> Decision | Rejection:
        """Waits in the router's queue. Cancelling the call leaves the queue. Raises RouterGone, also when the router hangs."""
        ...

    def generate(
        self, model: str, replica_id: str, request: GenerationRequest, role: Role = "unified"
    ) -> AsyncGenerator[RequestProgress, None]:
        """Streams one choice from exactly that replica of the pool `role`. Closing the iterator cancels the request there.

        Raises ReplicaDied, ReplicaLeft, RequestRejected.
        """
        ...

    async def wait_hung(self, replica_id: str) -> None:
        """Returns once the router has fenced the replica; for one that is well, never."""
        ...

    def release(self, request_id: str, num_output_tokens: int) -> None:
        """The request has ended, was cancelled or never got its decision. Does not block; unknown ids are ignored."""
        ...

    def release_prefill(self, request_id: str) -> None:
        """The prefill replica of a pair has ended every choice of the request. Does not block; unknown ids are ignored."""
        ...

    def report_gone(self, replica_id: str) -> None:
        """Tells the router at once what silence would tell it later. Does not block."""
        ...

    async def num_serving(self) -> dict[str, int]:
        """Model -> replicas that can take requests, in the router's view. Raises RouterGone."""
        ...

    async def describe_router(self) -> dict[str, Any]:
        """The router's own view, for /debug/router. Raises RouterGone."""
        ...

    async def explain(self, request_id: str) -> list[Decision | Rejection]:
        """Recent decisions of the router on a request and its resends. Raises RouterGone."""
        ...
