"""The router's mind: admission queue, bookings and replica states, without a clock and without I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from replicas.stats import ReplicaReport, ReportReply
from router.config import RouterConfig
from router.policies import Policy
from router.snapshot import ClusterSnapshot, Decision, Rejection, ReplicaSnapshot, RoutingRequest


@dataclass(slots=True)
class _Replica:
    report: ReplicaReport
    reported_s: float
    booked: dict[str, RoutingRequest]


class Router:
    """Owns the queue, the bookings and what is known of each replica, for every model.

    First cut: one queue in arrival order and no prefix index. Times are seconds of any one clock, given by the caller.
    """

    def __init__(self, config: RouterConfig, policy: Policy) -> None:
        self._config = config
        self._policy = policy
        self._queue: deque[tuple[RoutingRequest, float]] = deque()
        self._replicas: dict[str, _Replica] = {}
        self._replica_of: dict[str, str] = {}  # request id -> replica id
        self._num_decisions = 0

    def submit(self, request: RoutingRequest, now_s: float) -> None:
        """Queues the request; `step` answers it. Raises ValueError when its id already waits."""
        if any(waiting.request_id == request.request_id for waiting, _ in self._queue):
            raise ValueError(f"request_id must be unique among waiting requests, got {request.request_id!r} again")
        self.release(request.request_id, now_s)
        self._queue.append((request, now_s))

    def step(self, now_s: float) -> list[Decision | Rejection]:
        """Dispatches and books whatever may go now; each submitted request appears in exactly one answer."""
        answers: list[Decision | Rejection] = []
        waiting: deque[tuple[RoutingRequest, float]] = deque()
        while self._queue:
            request, submitted_s = self._queue.popleft()
            candidates = self._candidates(request, now_s)
            if candidates:
                decision = self._policy.choose(request, ClusterSnapshot(now_s=now_s, replicas=candidates), self._num_decisions)
                self._num_decisions += 1
                self._replicas[decision.replica_id].booked[request.request_id] = request
                self._replica_of[request.request_id] = decision.replica_id
                answers.append(decision)
            elif not self._serves(request.model) and now_s - submitted_s >= self._config.no_replica_timeout_s:
                reason = f"no replica serves {request.model}"
                answers.append(Rejection(request_id=request.request_id, reason=reason, retry_after_s=5.0, is_unavailable=True))
            else:
                waiting.append((request, submitted_s))
        self._queue = waiting
        return answers

    def cancel(self, request_id: str, now_s: float) -> None:
        """The caller is gone: the request leaves the queue, or its booking ends."""
        self._queue = deque(entry for entry in self._queue if entry[0].request_id != request_id)
        self.release(request_id, now_s)

    def release(self, request_id: str, now_s: float, num_output_tokens: int | None = None) -> None:
        """A dispatched request ended; unknown ids are ignored. `num_output_tokens` settles its tenant's counter."""
        replica_id = self._replica_of.pop(request_id, None)
        if replica_id is not None and replica_id in self._replicas:
            self._replicas[replica_id].booked.pop(request_id, None)

    def apply_report(self, report: ReplicaReport, now_s: float) -> ReportReply:
        """Takes a replica's report in, in any order and number of copies."""
        known = self._replicas.get(report.replica_id)
        if known is None:
            self._replicas[report.replica_id] = _Replica(report, now_s, {})
        elif report.epoch >= known.report.epoch:
            known.report, known.reported_s = report, now_s
        return ReportReply()

    def remove_replica(self, replica_id: str, now_s: float) -> None:
        """The replica is gone: nothing goes there again until it reports anew."""
        replica = self._replicas.pop(replica_id, None)
        for request_id in replica.booked if replica is not None else ():
            self._replica_of.pop(request_id, None)

    def next_wakeup_s(self, now_s: float) -> float | None:
        """When `step` could have something to do without a new call in between; None when never."""
        return min((submitted_s + self._config.no_replica_timeout_s for _, submitted_s in self._queue), default=None)

    def describe(self, now_s: float) -> dict[str, object]:
        """What is known, as plain JSON values."""
        return {
            "num_waiting": len(self._queue),
            "replicas": {
                replica_id: {"report_age_s": now_s - replica.reported_s, "num_booked": len(replica.booked)}
                for replica_id, replica in self._replicas.items()
            },
        }

    def _serves(self, model: str) -> bool:
        return any(replica.report.model == model for replica in self._replicas.values())

    def _candidates(self, request: RoutingRequest, now_s: float) -> tuple[ReplicaSnapshot, ...]:
        limit = self._config.dispatch_ahead
        return tuple(
            ReplicaSnapshot(
                replica_id=replica_id,
                stats=replica.report.stats,
                max_num_seqs=replica.report.max_num_seqs,
                block_size=replica.report.block_size,
                num_booked_requests=max(0, len(replica.booked) - replica.report.stats.num_running - replica.report.stats.num_waiting),
                report_age_s=now_s - replica.reported_s,
            )
            for replica_id, replica in sorted(self._replicas.items())
            if replica.report.model == request.model
            and not replica.report.is_draining
            and replica_id not in request.excluded_replicas
            and (limit is None or len(replica.booked) < replica.report.max_num_seqs + limit)
        )
