"""The engine as its drivers see it: a thread, a replica or an offline caller. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvcache.events import KVEvent
from replicas.request import GenerationRequest, RequestKey, StepOutput
from replicas.stats import ReplicaStats


class EngineUnhealthy(RuntimeError):
    """The engine died, or had work for longer than its deadline without finishing a step.

    Not raised while the engine loads, is idle, or finishes steps slowly.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class KVChanges:
    """Changes of the prefix cache from event `first_event` on, or every cached block when `is_full_state`."""

    first_event: int
    events: tuple[KVEvent, ...]
    is_full_state: bool


class StepEngine(Protocol):
    """An engine that its caller steps: `replicas.engine.engine.Engine`, or a fake with hand-calculable output."""

    @property
    def has_work(self) -> bool: ...
    def add_request(self, request: GenerationRequest) -> None: ...
    def cancel(self, key: RequestKey) -> bool: ...
    def step(self) -> StepOutput: ...
    def wake(self) -> None:
        """Ends a step that only waits for transfers. Callable from any thread."""

    def stats(self) -> ReplicaStats: ...
    def kv_changes(self, since: int | None) -> KVChanges: ...
    def close(self) -> None: ...
