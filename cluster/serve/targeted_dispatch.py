"""A Serve request router that sends a request to the replica its sender named, and to no other.

The sender puts the replica's unique id into `session_id`; a call without one (a description, a ping) takes any replica.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster.serve.target_unreachable import TargetUnreachable

INTRODUCTION_TIMEOUT_S = 5.0


class TargetedDispatch(RequestRouter):  # type: ignore[misc]
    """Keeps Serve's own retry for untargeted calls; a targeted one is tried once, so that the sender decides anew."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._by_unique_id: dict[str, RunningReplica] = {}  # unique id -> running replica
        self._seen: set[str] = set()  # unique ids that ever ran

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._by_unique_id = {replica.replica_id.unique_id: replica for replica in replicas}
        self._seen.update(self._by_unique_id)

    async def _choose_replica_for_request(self, pending_request: PendingRequest, *, is_retry: bool = False) -> RunningReplica:
        target = pending_request.metadata.session_id
        if not target:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        if is_retry:
            raise TargetUnreachable(f"replica {target} turned the request away")
        if target not in self._seen:
            await self._wait_introduced(target)
        replica = self._by_unique_id.get(target)
        if replica is None:
            raise TargetUnreachable(f"replica {target} is not running")
        return replica

    async def _wait_introduced(self, target: str) -> None:
        """A new replica reports to the router a moment before Serve tells this process of it. One that left is not waited for."""
        with suppress(TimeoutError):
            async with asyncio.timeout(INTRODUCTION_TIMEOUT_S):
                while target not in self._seen:
                    self._replicas_updated_event.clear()
                    await self._replicas_updated_event.wait()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas]
