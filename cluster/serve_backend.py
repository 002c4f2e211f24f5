"""The Backend over Ray Serve handles: the router is one actor, each model's replicas are one deployment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextvars import Context
from typing import Any

from ray.exceptions import RayActorError, RaySystemError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from cluster.backend import ReplicaGone, RouterGone
from cluster.target_unreachable import TargetUnreachable
from replicas.async_engine import EngineUnhealthy
from replicas.model_description import ModelDescription
from replicas.request import GenerationRequest, RequestProgress
from router.snapshot import Decision, Rejection, RoutingRequest

logger = logging.getLogger(__name__)

_UNREACHABLE = (RayActorError, RaySystemError, DeploymentUnavailableError, BackPressureError, TargetUnreachable, EngineUnhealthy)
_ANSWER_TIMEOUT_S = 5.0


class ServeBackend:
    """Owns nothing but handles and the notices that are still on their way to the router."""

    def __init__(self, router: Any, replicas: Mapping[str, Any]) -> None:
        """`replicas` maps a model's name to the handle of its deployment."""
        self._router = router
        self._replicas = dict(replicas)
        self._notices: set[asyncio.Task[None]] = set()

    async def describe(self, model: str) -> ModelDescription:
        try:
            return await self._replicas[model].describe.remote()  # type: ignore[no-any-return]
        except _UNREACHABLE as error:
            raise ReplicaGone("any", _first_line(error)) from error

    async def acquire(self, request: RoutingRequest) -> Decision | Rejection:
        response = self._router.acquire.remote(request)
        try:
            return await response  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            response.cancel()
            raise
        except _UNREACHABLE as error:
            raise RouterGone(_first_line(error)) from error

    async def generate(self, model: str, replica_id: str, request: GenerationRequest) -> AsyncGenerator[RequestProgress, None]:
        handle = self._replicas[model].options(method_name="generate", session_id=replica_id, stream=True)
        stream = handle.remote(request)
        is_finished = False
        try:
            async for progress in stream:
                is_finished = progress.finish_reason is not None
                yield progress
        except _UNREACHABLE as error:
            is_finished = True
            raise ReplicaGone(replica_id, _first_line(error)) from error
        finally:
            if not is_finished:
                stream.cancel()

    def release(self, request_id: str, num_output_tokens: int) -> None:
        self._notify(lambda: self._router.release.remote(request_id, num_output_tokens), f"end of {request_id}")

    def report_gone(self, replica_id: str) -> None:
        self._notify(lambda: self._router.remove_replica.remote(replica_id), f"loss of replica {replica_id}")

    async def describe_router(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                return await self._router.describe.remote()  # type: ignore[no-any-return]
        except (TimeoutError, *_UNREACHABLE) as error:
            raise RouterGone(_first_line(error)) from error

    def _notify(self, send: Callable[[], Any], what: str) -> None:
        """Sends from a context of its own: Serve cancels the calls made in the context of a request together with it."""
        task = asyncio.create_task(self._deliver(send, what), context=Context())
        self._notices.add(task)
        task.add_done_callback(self._notices.discard)

    async def _deliver(self, send: Callable[[], Any], what: str) -> None:
        """A notice that does not arrive is only logged: bookings expire, and silence tells of a dead replica too."""
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await send()
        except (TimeoutError, *_UNREACHABLE) as error:
            logger.warning("the router did not hear of the %s: %s", what, _first_line(error))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
