"""The gateway's interface to the rest of the cluster. Serve implements it with actors, tests with an engine in the process."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from replicas.engine_config import Role
from replicas.model_description import ModelDescription
from replicas.request import GenerationRequest, RequestProgress
from router.snapshot import Decision, Rejection, RoutingRequest


class Backend(Protocol):
    """Routes and runs requests. Callers follow every `acquire` by one `release`, whatever its result."""

    def start(self) -> None:
        """Starts renewing this caller's lease; needs a running event loop."""
        ...

    async def close(self) -> None: ...

    async def describe(self, model: str) -> ModelDescription:
        """The facts of a model's engines; waits until one replica of any pool has loaded. Raises ReplicaGone."""
        ...

    async def acquire(self, request: RoutingRequest) -> Decision | Rejection:
        """Waits in the router's queue for its answer. Cancelling the call leaves the queue. Raises RouterGone, also when the router
        hangs."""
        ...

    def generate(
        self, model: str, replica_id: str, request: GenerationRequest, role: Role = "unified"
    ) -> AsyncGenerator[RequestProgress, None]:
        """Streams one choice from exactly this replica of the pool `role`. Closing the iterator cancels the request there.

        Raises ReplicaDied, ReplicaLeft, RequestRejected.
        """
        ...

    async def wait_hung(self, replica_id: str) -> None:
        """Returns once the router has fenced the replica; never returns while the replica is healthy."""
        ...

    def release(self, request_id: str, num_output_tokens: int) -> None:
        """Ends the booking of a request that has ended, was cancelled or never got a decision. Does not block; unknown ids are
        ignored."""
        ...

    def release_prefill(self, request_id: str) -> None:
        """Ends the booking on a pair's prefill replica, after all choices have ended there. Does not block; unknown ids are ignored."""
        ...

    def report_gone(self, replica_id: str) -> None:
        """Tells the router that a replica is dead, before its silence does. Does not block."""
        ...

    async def num_serving(self) -> dict[str, int]:
        """Model -> replicas that can take requests, in the router's view. Raises RouterGone."""
        ...

    async def describe_router(self) -> dict[str, Any]:
        """The router's state, for /debug/router. Raises RouterGone."""
        ...

    async def explain(self, request_id: str) -> list[Decision | Rejection]:
        """The router's recent answers to a request and its resends. Raises RouterGone."""
        ...
