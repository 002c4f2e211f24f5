"""The engine's view of handoffs, and the null object of an engine without any. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from replicas.request import GenerationRequest, RequestKey, RequestProgress, RequestRejected
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import StepPlan
from replicas.stats import HandoffStats


class KVExchange(Protocol):
    """Gives an engine's KV to other engines and brings KV from them. Used by the engine's thread, except `wake`."""

    @property
    def is_open(self) -> bool:
        """Whether this engine exchanges KV at all."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether transfers hold blocks or pulls run, so that steps must continue until they end."""
        ...

    @property
    def tokens_per_s(self) -> float | None:
        """Measured rate of KV received; None before the first handoff."""
        ...

    def check_request(self, request: GenerationRequest) -> None:
        """Raises RequestRejected for a request with `wants_handoff` if this engine hands nothing over."""
        ...

    def start_pull(self, state: RequestState) -> None:
        """Starts the pull of a newly accepted request with a handoff. If the handoff does not fit, the KV is computed here."""
        ...

    def collect(self) -> list[RequestProgress]:
        """Before scheduling: takes what has arrived or ended since the last step. Returns the resulting progress."""
        ...

    def reserve(self) -> None:
        """After scheduling: opens the blocks of newly loading requests to their pulls."""
        ...

    def note_step(self, plan: StepPlan) -> list[RequestProgress]:
        """After a step, before `Scheduler.update`: makes the computed KV readable. Returns the new offers."""
        ...

    def note_progress(self, progress: Sequence[RequestProgress]) -> None:
        """After a step: completes or withdraws the offers of requests that ended."""
        ...

    def drop(self, key: RequestKey) -> None:
        """Ends the pull or offer of a cancelled request, also of one that has ended with HANDOFF."""
        ...

    def wait(self) -> None:
        """Sleeps until a transfer ends, a few milliseconds at most."""
        ...

    def wake(self) -> None:
        """Ends a `wait`. Callable from any thread."""
        ...

    def stats(self) -> HandoffStats: ...

    def checked_tables(self) -> Sequence[Sequence[int]]:
        """Block tables held by transfers. Raises AssertionError if an invariant does not hold."""
        ...

    def close(self) -> None: ...


class NoExchange:
    """Null object of an engine with role unified: it hands nothing over, and computes the KV of requests that bring a handoff."""

    is_open = False
    has_work = False
    tokens_per_s: float | None = None

    def check_request(self, request: GenerationRequest) -> None:
        if request.wants_handoff:
            raise RequestRejected("wants_handoff is set, but this engine hands nothing over: its role is unified")

    def start_pull(self, state: RequestState) -> None:
        pass

    def collect(self) -> list[RequestProgress]:
        return []

    def reserve(self) -> None:
        pass

    def note_step(self, plan: StepPlan) -> list[RequestProgress]:
        return []

    def note_progress(self, progress: Sequence[RequestProgress]) -> None:
        pass

    def drop(self, key: RequestKey) -> None:
        pass

    def wait(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def stats(self) -> HandoffStats:
        return HandoffStats()

    def checked_tables(self) -> Sequence[Sequence[int]]:
        return ()

    def close(self) -> None:
        pass
