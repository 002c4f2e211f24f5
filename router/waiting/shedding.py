"""Which requests are rejected, why, and when they may retry."""

from __future__ import annotations

from collections.abc import Callable

from router.config import RouterConfig
from router.fleet.rates import DrainRate
from router.routing_statistics import RoutingCounters
from router.snapshot import Rejection, RejectionKind, RoutingRequest
from router.waiting.admission import AdmissionQueue

_MAX_RETRY_AFTER_S = 60.0


class Shedding:
    """Applies one model's limits to its queue. Owns the measured drain rate of the queue; counts every rejection."""

    def __init__(
        self, model: str, config: RouterConfig, queue: AdmissionQueue, counters: RoutingCounters, capacity: Callable[[], float]
    ) -> None:
        """`capacity` gives the prompt tokens per second that all replicas together could prefill."""
        self._model = model
        self._config = config
        self._queue = queue
        self._counters = counters
        self._capacity = capacity
        self._drain = DrainRate()

    @property
    def drain_tokens_per_s(self) -> float:
        return self._drain.tokens_per_s(self._capacity())

    def note_dispatch(self, num_prompt_tokens: int, now_s: float) -> None:
        """Records that a request left the queue for a replica."""
        self._drain.observe(now_s, num_prompt_tokens, is_backlogged=len(self._queue) > 0)

    def admit(self, request: RoutingRequest, *, has_replicas: bool) -> tuple[bool, list[Rejection]]:
        """Whether the request may join the queue, and the rejections: of the request itself, or of one that it displaces.

        A full queue gives up the newest request of its lowest priority first.
        """
        config = self._config
        limit = config.max_queue_requests_per_tenant
        if limit is not None and self._queue.num_waiting_of(request.tenant) >= limit:
            return False, [self._reject(request, "tenant_limit", f"tenant {request.tenant!r} has {limit} requests waiting already")]
        wait_limit_s = config.wait_limit_s(request.priority)
        if wait_limit_s is not None and has_replicas:
            wait_s = self._predicted_wait_s(request.priority)
            if wait_s > wait_limit_s:
                reason = f"predicted wait of {wait_s:.1f} s exceeds {wait_limit_s:.1f} s"
                return False, [self._reject(request, "predicted_wait", reason, wait_s - wait_limit_s)]
        if len(self._queue) >= config.max_queue_requests:
            displaced = self._queue.pop_lowest_below(request.priority)
            full = f"the queue of {self._model} is full ({config.max_queue_requests} requests)"
            return displaced is not None, [self._reject(displaced or request, "queue_full", full)]
        return True, []

    def reject_unserved(self, requests: list[RoutingRequest]) -> list[Rejection]:
        """Rejects requests that waited too long for a first replica."""
        for _ in requests:
            self._counters.note_rejection("no_replica")
        reason, wait_s = f"no replica of {self._model} is up", self._config.no_replica_timeout_s
        return [Rejection(request_id=request.request_id, reason=reason, retry_after_s=wait_s, kind="no_replica") for request in requests]

    def _reject(self, request: RoutingRequest, kind: RejectionKind, reason: str, wait_s: float | None = None) -> Rejection:
        self._counters.note_rejection(kind)
        if wait_s is None:
            wait_s = self._predicted_wait_s(request.priority)
        retry_after_s = min(_MAX_RETRY_AFTER_S, max(1.0, wait_s))
        return Rejection(request_id=request.request_id, reason=reason, retry_after_s=retry_after_s, kind=kind)

    def _predicted_wait_s(self, priority: int) -> float:
        """Time until the requests ahead of a new one of `priority` have left the queue."""
        return self._queue.num_tokens_ahead(priority) / self.drain_tokens_per_s
