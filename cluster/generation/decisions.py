"""Asks the router for the replica of a prompt, or of a choice that lost its replica."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from cluster.backend import Backend
from cluster.failures import ModelRemoved, Overloaded, RouterGone, Unavailable
from cluster.generation.prepared_generation import routing_request
from cluster.models.served_model import ServedModel
from cluster.settings.failover import FailoverPolicy
from replicas.request import GenerationRequest
from router.snapshot import Decision, Rejection, RoutingRequest

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
_NO_REPLICA_PAUSE_S = 0.1  # after a rejection without a replica; the router waits itself before each


class Decisions:
    """Gets the router's decisions on requests for one model. Waits while the router restarts."""

    def __init__(
        self,
        backend: Backend,
        model: ServedModel,
        policy: FailoverPolicy,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._backend = backend
        self._model = model
        self._policy = policy
        self._clock = clock
        self._sleep = sleep

    async def first(self, request: GenerationRequest, *, num_choices: int) -> Decision:
        """The decision on a prompt with all its choices. Raises Overloaded, Unavailable."""
        return await self._decided(self._routing(request, num_choices))

    async def another(self, request: GenerationRequest, *, excluded: frozenset[str], is_alone: bool) -> Decision:
        """The decision on a choice that lost its replica. Raises Overloaded, Unavailable.

        It waits longer than the router's own limit, which is meant for requests that clients can still send elsewhere. A client that
        has already received text cannot, and a replica's restart takes as long as loading the model.
        """
        routing = self._routing(request, num_choices=1)
        routing = replace(routing, excluded_replicas=excluded, is_alone=is_alone, is_whole=routing.is_whole or is_alone)
        deadline_s = self._clock() + self._policy.replica_timeout_s
        while True:
            try:
                return await self._decided(routing)
            except ModelRemoved:
                raise
            except Unavailable:
                if self._clock() >= deadline_s:
                    raise
            await self._sleep(_NO_REPLICA_PAUSE_S)

    def _routing(self, request: GenerationRequest, num_choices: int) -> RoutingRequest:
        facts = self._model.description
        return routing_request(
            self._model.name, request, block_size=facts.block_size, weights_version=facts.weights_version, num_choices=num_choices
        )

    async def _decided(self, routing: RoutingRequest) -> Decision:
        answer = await self._ask(routing)
        if isinstance(answer, Rejection):
            if answer.kind == "not_served":
                raise ModelRemoved(answer.reason, answer.retry_after_s)
            if answer.is_unavailable:
                raise Unavailable(answer.reason, answer.retry_after_s)
            raise Overloaded(answer.reason, answer.retry_after_s)
        return answer

    async def _ask(self, routing: RoutingRequest) -> Decision | Rejection:
        """Asks a dead router again until it is back: gateways resubmit the requests that were queued there."""
        deadline_s = self._clock() + self._policy.router_timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._backend.acquire(routing)
            except RouterGone as error:
                if self._clock() + pause_s > deadline_s:
                    raise Unavailable("the router is restarting") from error
            await self._sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
