"""Routing for one model: its queue, its replicas, its index and its bookings."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from math import inf

from replicas.stats import ReplicaReport, ReportReply
from router.admission import AdmissionQueue, Waiting
from router.bookings import Booking, PendingPrefixes
from router.config import RouterConfig
from router.policies import Policy
from router.prefix_index import PrefixIndex
from router.preview import CandidatePreview
from router.rates import DrainRate, RateModel, Rates
from router.recording import DecisionSink
from router.replica_state import ReplicaState
from router.routing_statistics import RoutingCounters, RoutingStatistics
from router.snapshot import CandidateScore, ClusterSnapshot, Decision, Rejection, RejectionKind, ReplicaSnapshot, RoutingRequest
from router.solitary import SolitaryRequests

logger = logging.getLogger(__name__)

_REDECIDE_S = 0.25
"""How long a request keeps its place for a full replica before it is decided again."""
_LOOK_AGAIN_S = 1.0
"""A queue is looked at this often even if nothing is reported: replicas fall silent, and none must wait for them."""
_MAX_RETRY_AFTER_S = 60.0


class ModelRouter:
    """Owns everything that routing one model needs. `Router` hands calls on to one of these per model.

    `step` goes through the queue in order. The policy chooses among all replicas, busy ones too; when the chosen one
    already has `dispatch_ahead` requests waiting, the request keeps its place here and counts as that replica's work for
    the rest of the step, and the next in line is looked at, `lookahead` times at most. So a request waits for its prefix as
    long as that is predicted to pay, and no longer; and no other overtakes it for the same replica.
    """

    def __init__(self, model: str, config: RouterConfig, policy: Policy, sink: DecisionSink | None = None) -> None:
        self.model = model
        self._config = config
        self._policy = policy
        self._sink = sink
        self._queue = AdmissionQueue(config, self._best_cached_tokens)
        self._replicas: dict[str, ReplicaState] = {}  # in ascending order of id
        self._index = PrefixIndex()
        self._pending = PendingPrefixes()
        self._pending_on: dict[str, dict[str, Booking]] = {}  # replica id -> request id -> booking whose blocks are not reported
        self._bookings: OrderedDict[str, Booking] = OrderedDict()  # request id -> booking, oldest first
        self._prior = Rates(prefill_tokens_per_s=config.prior_prefill_tokens_per_s, decode_step_s=config.prior_decode_step_s)
        self._rates = RateModel(self._prior)
        self._drain = DrainRate()
        self._output_tokens = float(config.expected_output_tokens)
        self._answers: list[Rejection] = []
        self._solitary = SolitaryRequests()
        self._fenced: frozenset[str] = frozenset()
        self._preview = CandidatePreview(())
        self._usable_until_s = -inf  # then `_usable` looks again
        self._expire_at_s = 0.0
        self._closed_until_s: float | None = None  # no replica takes work before this time, unless something changes
        self._last_open: ReplicaState | None = None  # where `_has_open` looks first
        self._num_decisions = 0
        self._counters = RoutingCounters()

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + len(self._solitary)

    def has(self, request_id: str) -> bool:
        return request_id in self._queue or request_id in self._bookings or request_id in self._solitary

    def is_waiting(self, request_id: str) -> bool:
        return request_id in self._queue or request_id in self._solitary

    def submit(self, request: RoutingRequest, now_s: float) -> None:
        if request.request_id in self._queue:
            raise ValueError(f"request_id must be unique among waiting requests, got {request.request_id!r} again")
        self.release(request.request_id, now_s)  # a resend: whatever was booked for the older attempt has ended
        if request.is_alone:
            self._solitary.add(request, now_s)
            return
        # A resend was admitted once, and its client has text already: it is not turned away for the number of others.
        rejection = None if request.attempt else self._shed(request, now_s)
        if rejection is not None:
            self._answers.append(rejection)
            return
        self._queue.submit(request, now_s, request.num_prompt_tokens / self._rates.typical_prefill_tokens_per_s)

    def step(self, now_s: float) -> list[Decision | Rejection]:
        answers: list[Decision | Rejection] = list(self._answers)
        self._answers.clear()
        if now_s >= self._expire_at_s:
            self._expire(now_s)
            self._expire_at_s = now_s + self._config.booking_expiry_s / 10
        if len(self._solitary):
            answers += self._dispatch_solitary(now_s)
        if not self._replicas:
            answers += self._reject_unserved(now_s)
        elif len(self._queue) and not (self._closed_until_s is not None and now_s < self._closed_until_s):
            answers += self._dispatch(now_s)
        return answers

    def cancel(self, request_id: str, now_s: float) -> None:
        if not self._queue.cancel(request_id):
            self.release(request_id, now_s)

    def release(self, request_id: str, now_s: float, num_output_tokens: int | None = None) -> None:
        if self._solitary.end(request_id):
            self._note_usable_changed()
        booking = self._bookings.pop(request_id, None)
        if booking is None:
            return
        self._forget_pending(booking)
        replica = self._replicas.get(booking.replica_id)
        if replica is not None and replica.epoch == booking.epoch:
            replica.release(booking)
            self._note_change(replica, now_s)
        if num_output_tokens is not None:
            self._output_tokens += 0.05 * (num_output_tokens / booking.request.num_choices - self._output_tokens)
            self._queue.charge(booking.request, self._config.fair_output_weight * (num_output_tokens - booking.num_charged_tokens))

    def apply_report(self, report: ReplicaReport, now_s: float) -> ReportReply:
        replica = self._replicas.get(report.replica_id)
        if replica is not None and report.epoch < replica.epoch:
            return ReportReply()
        resync = self._index.apply(
            report.replica_id,
            epoch=report.epoch,
            first_event=report.first_event,
            events=report.events,
            is_full_state=report.is_full_state,
        )
        if replica is not None and report.epoch > replica.epoch:
            self._drop(report.replica_id)
            replica = None
        self._rates.observe(report.replica_id, report.stats)
        rates = self._rates.rates(report.replica_id)
        if replica is None:
            replica = self._replicas[report.replica_id] = ReplicaState(report, now_s, rates)
            replica.is_fenced = report.replica_id in self._fenced
            self._replicas = dict(sorted(self._replicas.items()))
            self._usable_until_s = -inf
        else:
            if report.is_draining != replica.is_draining:
                self._usable_until_s = -inf
            replica.apply_report(report, now_s, rates)
            self._preview.update(replica)
            self._confirm_pending(report.replica_id)
        self._note_change(self._replicas[report.replica_id], now_s)
        return ReportReply(resync=resync)

    def remove_replica(self, replica_id: str) -> None:
        if replica_id in self._replicas:
            self._drop(replica_id)
            del self._replicas[replica_id]
            self._usable_until_s = -inf
            self._index.remove(replica_id)
            self._rates.forget(replica_id)
            self._counters.forget_replica(replica_id)
            self._closed_until_s = None

    def set_fenced(self, replica_ids: frozenset[str]) -> None:
        self._fenced = replica_ids
        for replica in self._replicas.values():
            replica.is_fenced = replica.replica_id in replica_ids
        self._note_usable_changed()

    def requests_of(self, caller: str) -> list[str]:
        waiting = [*(waiting.request for waiting in self._queue), *self._solitary.waiting]
        return [r.request_id for r in (*waiting, *(b.request for b in self._bookings.values())) if r.caller == caller]

    def next_wakeup_s(self, now_s: float) -> float | None:
        if self._answers:
            return now_s
        if not len(self._queue):
            return now_s + _LOOK_AGAIN_S if len(self._solitary) else None
        if not self._replicas:
            return min(waiting.submitted_s for waiting in self._queue) + self._config.no_replica_timeout_s
        if self._closed_until_s is not None and self._closed_until_s > now_s:
            return self._closed_until_s
        starts = [start_s for replica in self._replicas.values() if (start_s := replica.next_start_s(now_s)) is not None]
        return min([*starts, now_s + _LOOK_AGAIN_S])

    def statistics(self) -> RoutingStatistics:
        replicas: Counter[str] = Counter(usable=0, draining=0, fenced=0, reserved=0)
        for state in self._replicas.values():
            is_usable = self._is_usable(state)
            replicas["usable" if is_usable else "fenced" if state.is_fenced else "draining" if state.is_draining else "reserved"] += 1
        return RoutingStatistics(
            num_waiting=Counter(self._queue.num_waiting_by_tier()) + Counter(request.priority for request in self._solitary.waiting),
            num_bookings=len(self._bookings),
            num_replicas=replicas,
            num_decisions=dict(self._counters.decisions),
            num_rejections=dict(self._counters.rejections),
            num_prompt_tokens=dict(self._counters.prompt_tokens),
            num_cached_tokens=dict(self._counters.cached_tokens),
        )

    def describe(self, now_s: float) -> dict[str, object]:
        return {
            "num_waiting": self.num_waiting,
            "num_waiting_alone": len(self._solitary),
            "num_waiting_tokens": self._queue.num_tokens,
            "num_decisions": self._num_decisions,
            "num_rejections": self._counters.rejections.total(),
            "num_bookings": len(self._bookings),
            "num_index_blocks": self._index.num_nodes,
            "drain_tokens_per_s": round(self._drain.tokens_per_s(self._capacity()), 1),
            "expected_output_tokens": round(self._output_tokens, 1),
            "tiers": self._queue.describe(),
            "replicas": {
                replica_id: {**replica.describe(now_s), "num_cached_blocks": self._index.num_blocks(replica_id)}
                for replica_id, replica in self._replicas.items()
            },
        }

    def _dispatch(self, now_s: float) -> list[Decision | Rejection]:
        answers: list[Decision | Rejection] = []
        held: list[Waiting] = []
        wanted: list[ReplicaState] = []
        while len(held) < self._config.lookahead and (waiting := self._queue.peek(now_s)) is not None:
            replica = self._still_wanted(waiting, now_s)
            if replica is None:
                candidates = self._candidates(waiting.request, now_s)
                if candidates:
                    snapshot = ClusterSnapshot(now_s=now_s, replicas=candidates)
                    seed = self._config.seed + self._num_decisions
                    decision = self._policy.choose(waiting.request, snapshot, seed)
                    replica = self._replicas[decision.replica_id]
                    num_uncached = max(1, waiting.request.num_prompt_tokens - decision.num_cached_tokens)
                    if self._is_open(replica, now_s):
                        if self._sink is not None:
                            self._sink(waiting.request, snapshot, seed, decision)
                        num_outputs = self._expected_outputs(waiting.request)
                        self._queue.dispatch(waiting, num_uncached, num_outputs, now_s)
                        self._drain.observe(now_s, waiting.request.num_prompt_tokens, is_backlogged=len(self._queue) > 0)
                        self._book(waiting.request, replica, num_uncached, num_outputs, now_s)
                        answers.append(decision)
                        continue
                    waiting.wanted, waiting.wanted_s, waiting.wanted_tokens = replica.replica_id, now_s, num_uncached
            self._queue.hold(waiting)
            held.append(waiting)
            if replica is not None:
                replica.held_tokens += waiting.wanted_tokens
                wanted.append(replica)
            if not self._has_open(now_s):
                self._closed_until_s = None
                self._closed_until_s = self.next_wakeup_s(now_s)
                break
        self._queue.restore(held)
        for replica in wanted:
            replica.held_tokens = 0
        return answers

    def _still_wanted(self, waiting: Waiting, now_s: float) -> ReplicaState | None:
        """The full replica that the request was found to wait for a moment ago; None when it must be decided (again)."""
        replica = self._replicas.get(waiting.wanted) if waiting.wanted is not None else None
        if replica is None or now_s - waiting.wanted_s > _REDECIDE_S or self._is_open(replica, now_s):
            return None
        return replica if self._is_usable(replica) else None

    def _is_usable(self, replica: ReplicaState) -> bool:
        return not (replica.is_draining or replica.is_fenced or replica.replica_id in self._solitary.reserved)

    def _is_open(self, replica: ReplicaState, now_s: float) -> bool:
        limit = self._config.dispatch_ahead
        return limit is None or replica.num_waiting(now_s) < limit

    def _has_open(self, now_s: float) -> bool:
        if self._last_open is None or not self._is_open(self._last_open, now_s):
            self._last_open = next((replica for replica in self._replicas.values() if self._is_open(replica, now_s)), None)
        return self._last_open is not None

    def _note_change(self, replica: ReplicaState, now_s: float) -> None:
        """What is known of one replica has changed: while all were full, only this one can have opened, or may open sooner."""
        if self._closed_until_s is None:
            return
        if self._is_open(replica, now_s):
            self._closed_until_s = None
        elif (start_s := replica.next_start_s(now_s)) is not None:
            self._closed_until_s = min(self._closed_until_s, start_s)

    def _candidates(self, request: RoutingRequest, now_s: float) -> tuple[ReplicaSnapshot, ...]:
        """Replicas that may take the request, as the policy is to see them; empty when all of them drain.

        A silent replica is left out while another reports, and so is one that failed this request while another has not.
        """
        preview = self._usable(now_s)
        states = preview.states
        if request.excluded_replicas:
            states = [state for state in states if state.replica_id not in request.excluded_replicas] or states
        cached = self._index.match(request.block_keys)
        pending = self._pending.match(request.block_keys)
        if not self._policy.examines_all and len(states) > self._config.max_candidates:
            states = preview.best(self._config.max_candidates, now_s, cached, pending, request.excluded_replicas)
        return tuple([state.snapshot(now_s, cached.get(state.replica_id, 0), pending.get(state.replica_id, 0)) for state in states])

    def _usable(self, now_s: float) -> CandidatePreview:
        """Replicas that report and neither drain, hang nor are reserved; silent ones only when all are silent."""
        if self._usable_until_s <= now_s:
            running = [state for state in self._replicas.values() if self._is_usable(state)]
            timeout_s = self._config.report_timeout_s
            self._preview = CandidatePreview([state for state in running if now_s - state.reported_s <= timeout_s] or running)
            self._usable_until_s = now_s + _LOOK_AGAIN_S
        return self._preview

    def _dispatch_solitary(self, now_s: float) -> list[Decision]:
        """Decisions on requests whose replica is empty now. Nothing to choose and nothing to predict: it waits for nobody."""
        reserved = self._solitary.reserved
        usable = [state for state in self._replicas.values() if not (state.is_draining or state.is_fenced)]
        decisions = []
        for request, replica in self._solitary.take_ready(usable):
            depth = self._index.match(request.block_keys).get(replica.replica_id, 0)
            num_cached = min(depth * replica.block_size, request.num_prompt_tokens)
            num_uncached = max(1, request.num_prompt_tokens - num_cached)
            self._book(request, replica, num_uncached, self._expected_outputs(request), now_s)
            predicted_s = num_uncached / replica.prefill_tokens_per_s
            decisions.append(
                Decision(
                    request_id=request.request_id,
                    replica_id=replica.replica_id,
                    predicted_ttft_s=predicted_s,
                    num_cached_tokens=num_cached,
                    candidates=(CandidateScore(replica_id=replica.replica_id, cost=predicted_s, terms=(("alone", predicted_s),)),),
                )
            )
        if self._solitary.reserved != reserved:
            self._note_usable_changed()
        return decisions

    def _note_usable_changed(self) -> None:
        self._usable_until_s = -inf
        self._closed_until_s = None

    def _expected_outputs(self, request: RoutingRequest) -> int:
        return min(request.max_tokens, round(self._output_tokens) * request.num_choices)

    def _book(self, request: RoutingRequest, replica: ReplicaState, num_uncached: int, num_outputs: int, now_s: float) -> None:
        booking = Booking(
            request=request,
            replica_id=replica.replica_id,
            epoch=replica.epoch,
            booked_s=now_s,
            num_uncached_tokens=num_uncached,
            num_context_tokens=request.num_prompt_tokens + num_outputs,
            num_charged_tokens=num_outputs,
        )
        replica.book(booking, now_s)
        self._preview.update(replica)
        self._bookings[request.request_id] = booking
        if request.block_keys:
            self._pending.add(booking)
            self._pending_on.setdefault(replica.replica_id, {})[request.request_id] = booking
        self._num_decisions += 1
        self._counters.note_decision(request, replica.replica_id, max(0, request.num_prompt_tokens - num_uncached))

    def _confirm_pending(self, replica_id: str) -> None:
        """Bookings whose last block is in the index now are no longer pending."""
        waiting = self._pending_on.get(replica_id, {})
        for booking in [b for b in waiting.values() if self._index.holds(replica_id, b.request.block_keys[-1])]:
            self._forget_pending(booking)

    def _forget_pending(self, booking: Booking) -> None:
        on_replica = self._pending_on.get(booking.replica_id)
        if on_replica is not None and on_replica.pop(booking.request.request_id, None) is not None:
            self._pending.remove(booking)
            if not on_replica:
                del self._pending_on[booking.replica_id]

    def _drop(self, replica_id: str) -> None:
        """The replica, or its epoch, is gone, and with it all that was booked there."""
        self._last_open = None
        for booking in [b for b in self._bookings.values() if b.replica_id == replica_id]:
            del self._bookings[booking.request.request_id]
            self._forget_pending(booking)

    def _expire(self, now_s: float) -> None:
        for replica in self._replicas.values():
            for booking in replica.expire(now_s, self._config.booking_expiry_s):
                logger.warning("request %s: no report of %s shows it; its booking expired", booking.request.request_id, replica.replica_id)
                self._forget_pending(booking)
        while self._bookings:
            request_id, booking = next(iter(self._bookings.items()))
            if booking.booked_s + self._config.lease_s > now_s:
                break
            self.release(request_id, now_s)

    def _reject_unserved(self, now_s: float) -> list[Rejection]:
        timeout_s = self._config.no_replica_timeout_s
        overdue = [waiting.request for waiting in self._queue if now_s - waiting.submitted_s >= timeout_s]
        for request in overdue:
            self._queue.cancel(request.request_id)
        overdue += self._solitary.take_older_than(now_s - timeout_s)
        reason = f"no replica of {self.model} is up"
        for _ in overdue:
            self._counters.note_rejection("no_replica")
        return [Rejection(request_id=request.request_id, reason=reason, retry_after_s=timeout_s, kind="no_replica") for request in overdue]

    def _shed(self, request: RoutingRequest, now_s: float) -> Rejection | None:
        """Why the request is not admitted, if so. A full queue gives up its newest request of the lowest class first."""
        config = self._config
        limit = config.max_queue_requests_per_tenant
        if limit is not None and self._queue.num_waiting_of(request.tenant) >= limit:
            return self._rejection(request, "tenant_limit", f"tenant {request.tenant!r} has {limit} requests waiting already")
        wait_limit_s = config.wait_limit_s(request.priority)
        if wait_limit_s is not None and self._replicas:
            wait_s = self._predicted_wait_s(request.priority)
            if wait_s > wait_limit_s:
                reason = f"predicted wait of {wait_s:.1f} s exceeds {wait_limit_s:.1f} s"
                return self._rejection(request, "predicted_wait", reason, wait_s - wait_limit_s)
        if len(self._queue) >= config.max_queue_requests:
            displaced = self._queue.pop_lowest_below(request.priority)
            full = f"the queue of {self.model} is full ({config.max_queue_requests} requests)"
            if displaced is None:
                return self._rejection(request, "queue_full", full)
            self._answers.append(self._rejection(displaced, "queue_full", full))
        return None

    def _rejection(self, request: RoutingRequest, kind: RejectionKind, reason: str, wait_s: float | None = None) -> Rejection:
        self._counters.note_rejection(kind)
        if wait_s is None:
            wait_s = self._predicted_wait_s(request.priority)
        retry_after_s = min(_MAX_RETRY_AFTER_S, max(1.0, wait_s))
        return Rejection(request_id=request.request_id, reason=reason, retry_after_s=retry_after_s, kind=kind)

    def _predicted_wait_s(self, priority: int) -> float:
        """Time until what waits ahead of a new request of `priority` has drained."""
        return self._queue.num_tokens_ahead(priority) / self._drain.tokens_per_s(self._capacity())

    def _capacity(self) -> float:
        """Prompt tokens a second that all replicas together could prefill."""
        total = sum(replica.prefill_tokens_per_s for replica in self._replicas.values())
        return total or self._prior.prefill_tokens_per_s

    def _best_cached_tokens(self, request: RoutingRequest) -> int:
        depths = self._index.match(request.block_keys)
        return max((depth * self._replicas[replica_id].block_size for replica_id, depth in depths.items()), default=0)
