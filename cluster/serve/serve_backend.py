"""The Backend over Ray Serve handles: the router is one actor, each pool of a model's replicas is one deployment."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import replace
from typing import Any

from ray.exceptions import RayActorError, RaySystemError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from cluster.failures import ReplicaDied, ReplicaGone, ReplicaHung, ReplicaLeft, RouterGone
from cluster.serve.interrupts import Interrupted, Interrupts
from cluster.serve.router_line import RouterLine
from cluster.serve.target_unreachable import TargetUnreachable
from replicas.engine_config import Role
from replicas.model_description import ModelDescription
from replicas.request import GenerationRequest, RequestProgress
from replicas.step_engine import EngineUnhealthy
from router.live.batch import PrefillEnded, ReplicaLost, RequestEnded
from router.snapshot import Decision, Rejection, RoutingRequest

logger = logging.getLogger(__name__)

_NEVER_TOOK = (DeploymentUnavailableError, BackPressureError, TargetUnreachable)
_DIED = (RayActorError, RaySystemError, EngineUnhealthy)
_UNREACHABLE = (*_NEVER_TOOK, *_DIED)
_ANSWER_TIMEOUT_S = 5.0
RENEWAL_TIMEOUT_S = 4.0
"""The router answers a renewal within a second. When it does not, calls that wait for it are given up, and made again."""
_RENEWAL_PAUSE_S = 0.25
_ROUTER = "router"


class ServeBackend:
    """Owns its name as a caller, and its line to the router.

    While it runs it renews its lease there. The answers tell which replicas are fenced: whoever waits for one of them is
    interrupted at once.
    """

    def __init__(self, router: Any, replicas: Mapping[str, Mapping[Role, Any]], renewal_timeout_s: float = RENEWAL_TIMEOUT_S) -> None:
        """`replicas` maps a model's name to its pools, and each pool to the handle of its deployment."""
        self._router = router
        self._replicas = {model: dict(pools) for model, pools in replicas.items()}
        self._renewal_timeout_s = renewal_timeout_s
        self._caller = f"gateway-{secrets.token_hex(6)}"
        self._fenced: frozenset[str] = frozenset()
        self._interrupts = Interrupts()
        self._renewal: asyncio.Task[None] | None = None
        self._line = RouterLine(
            self._caller,
            deliver=lambda batch: self._ask(lambda: self._router.deliver.remote(batch)),
            wait_answers=lambda caller: self._ask(lambda: self._router.wait_answers.remote(caller)),
        )

    def start(self) -> None:
        self._renewal = asyncio.create_task(self._keep_renewing(), name="renewal", context=Context())

    async def close(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)
        await self._line.close()

    async def describe(self, model: str) -> ModelDescription:
        asked = [asyncio.create_task(_described_by(handle)) for handle in self._replicas[model].values()]
        try:
            return await _first_answer(asked)
        except _UNREACHABLE as error:
            raise ReplicaGone("any", _first_line(error)) from error
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def acquire(self, request: RoutingRequest) -> Decision | Rejection:
        return await self._line.acquire(request)

    async def generate(
        self, model: str, replica_id: str, request: GenerationRequest, role: Role = "unified"
    ) -> AsyncGenerator[RequestProgress, None]:
        if replica_id in self._fenced:
            raise ReplicaLeft(replica_id, "it is fenced")
        if role not in self._replicas[model]:  # of another version of the configuration, while one takes the place of the other
            raise ReplicaLeft(replica_id, f"this gateway has no pool {role!r} of {model}")
        handle = self._replicas[model][role].options(method_name="generate", session_id=replica_id, stream=True)
        stream = handle.remote(replace(request, caller=self._caller))
        messages = aiter(stream)
        is_finished = False
        try:
            while True:
                async with self._interrupts.guard(replica_id):
                    progress = await anext(messages, None)
                if progress is None:
                    return
                is_finished = progress.finish_reason is not None
                yield progress
        except Interrupted as error:
            raise ReplicaHung(replica_id, "it hangs") from error
        except _NEVER_TOOK as error:
            is_finished = True
            raise ReplicaLeft(replica_id, _first_line(error)) from error
        except _DIED as error:
            is_finished = True
            raise ReplicaDied(replica_id, _first_line(error)) from error
        finally:
            if not is_finished:
                stream.cancel()

    async def wait_hung(self, replica_id: str) -> None:
        if replica_id in self._fenced:
            return
        try:
            async with self._interrupts.guard(replica_id):
                await asyncio.Event().wait()
        except Interrupted:
            return

    def release(self, request_id: str, num_output_tokens: int) -> None:
        self._line.tell(RequestEnded(request_id, num_output_tokens))

    def release_prefill(self, request_id: str) -> None:
        self._line.tell(PrefillEnded(request_id))

    def report_gone(self, replica_id: str) -> None:
        self._line.tell(ReplicaLost(replica_id))

    async def num_serving(self) -> dict[str, int]:
        return await self._ask(self._router.num_serving.remote)  # type: ignore[no-any-return]

    async def describe_router(self) -> dict[str, Any]:
        return await self._ask(self._router.describe.remote)  # type: ignore[no-any-return]

    async def explain(self, request_id: str) -> list[Decision | Rejection]:
        return await self._ask(lambda: self._router.explain.remote(request_id))  # type: ignore[no-any-return]

    async def _ask(self, send: Callable[[], Any]) -> Any:
        """The answer of the router. Raises RouterGone when there is none in time, or others find that the router hangs."""
        response = send()
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S), self._interrupts.guard(_ROUTER):
                return await response
        except (TimeoutError, Interrupted) as error:
            response.cancel()
            raise RouterGone("it does not answer") from error
        except asyncio.CancelledError as error:
            response.cancel()
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise RouterGone("it cancelled the call") from error  # as a router does that is stopped
        except _UNREACHABLE as error:
            raise RouterGone(_first_line(error)) from error

    async def _keep_renewing(self) -> None:
        """Until cancelled. It must not end by itself: then the lease would expire, and every request be cancelled."""
        seen_version = 0
        while True:
            response = self._router.renew.remote(self._caller, seen_version)
            try:
                async with asyncio.timeout(self._renewal_timeout_s):
                    news = await response
            except TimeoutError:
                response.cancel()
                logger.warning("the router does not answer")
                self._interrupts.interrupt(_ROUTER)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next renewal may succeed
                logger.info("the lease cannot be renewed now: %s", _first_line(error))
                await asyncio.sleep(_RENEWAL_PAUSE_S)
            else:
                seen_version, self._fenced = news.version, news.fenced
                for replica_id in self._fenced:
                    self._interrupts.interrupt(replica_id)


async def _described_by(handle: Any) -> ModelDescription:
    return await handle.describe.remote()  # type: ignore[no-any-return]


async def _first_answer(asked: Sequence[asyncio.Task[ModelDescription]]) -> ModelDescription:
    """The first answer; raises the last error when there is none."""
    for following in asyncio.as_completed(asked):
        try:
            return await following
        except _UNREACHABLE as error:
            failure = error
    raise failure


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
