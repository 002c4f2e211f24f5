"""What an engine's step asks of handoffs, and the engine that has none. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from replicas.request import GenerationRequest, RequestKey, RequestProgress, RequestRejected
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import StepPlan
from replicas.stats import HandoffStats


class KVExchange(Protocol):
    """An engine's KV given to others, and brought from them. Used by the engine's thread, `wake` apart."""

    @property
    def has_work(self) -> bool:
        """Whether steps must go on until blocks that are lent or borrowed are back."""
        ...

    @property
    def tokens_per_s(self) -> float | None:
        """How fast KV came in; None before the first."""
        ...

    def check_request(self, request: GenerationRequest) -> None:
        """Raises RequestRejected for one that asks for what this engine does not do."""
        ...

    def start_pull(self, state: RequestState) -> None:
        """For a request that was just accepted and brings a handoff. One that does not fit is computed here."""
        ...

    def collect(self) -> list[RequestProgress]:
        """Before scheduling: what has arrived or ended since the last step. Returns the progress that it makes."""
        ...

    def reserve(self) -> None:
        """After scheduling: blocks for what comes from others."""
        ...

    def note_step(self, plan: StepPlan) -> list[RequestProgress]:
        """After a step, before its tokens are taken: what it computed becomes readable. Returns the new offers."""
        ...

    def note_progress(self, progress: Sequence[RequestProgress]) -> None:
        """What a step ended."""
        ...

    def drop(self, key: RequestKey) -> None:
        """The request was cancelled, here or after it was handed over."""
        ...

    def wait(self) -> None:
        """Sleeps until a transfer changes something, a little while at most."""
        ...

    def wake(self) -> None:
        """From any thread: ends a `wait`."""
        ...

    def stats(self) -> HandoffStats: ...

    def checked_tables(self) -> Sequence[Sequence[int]]:
        """Block tables held beside those of requests. Raises AssertionError when they contradict each other."""
        ...

    def close(self) -> None: ...


class NoExchange:
    """Of an engine whose role is unified: it hands nothing over, and computes what others would have brought."""

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
