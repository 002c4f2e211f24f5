"""Routing for one model: its queue, its replicas, its index and its bookings."""

from __future__ import annotations

import logging
from collections import Counter
from math import inf

from replicas.stats import ReplicaReport, ReportReply
from router.config import RouterConfig
from router.fleet.bookings import Booking
from router.fleet.candidate_pools import LOOK_AGAIN_S, ReplicaPools
from router.fleet.ledger import BookingLedger
from router.fleet.prefix_index import PrefixIndex
from router.fleet.rates import PoolRates, Rates
from router.fleet.replica_state import ReplicaState
from router.fleet.solitary import SolitaryRequests
from router.policies.policy import Policy
from router.policies.recording import DecisionSink
from router.routing_statistics import RoutingCounters, RoutingStatistics
from router.snapshot import CandidateScore, ClusterSnapshot, Decision, Rejection, RoutingRequest
from router.waiting.admission import AdmissionQueue, Waiting
from router.waiting.shedding import Shedding

logger = logging.getLogger(__name__)

_REDECIDE_S = 0.25
"""How long a request keeps its place for a full replica before it is decided again."""


class ModelRouter:
    """Owns everything that routing one model needs. `Router` hands calls on to one of these per model.

    `step` goes through the queue in order. The policy chooses among all replicas, busy ones too; when a chosen one already
    has `dispatch_ahead` requests waiting, the request keeps its place here and counts as work of the replica that is to
    compute it for the rest of the step, and the next in line is looked at, `lookahead` times at most. So a request waits for
    its prefix as long as that is predicted to pay, and no longer; and no other overtakes it for the same replica.

    With pools of their own for prefill and decode, the policy may choose a pair. It is booked in the same step: on the one
    replica until `release_prefill`, on the other until `release`.
    """

    def __init__(self, model: str, config: RouterConfig, policy: Policy, sink: DecisionSink | None = None) -> None:
        self.model = model
        self._config = config
        self._policy = policy
        self._sink = sink
        self._queue = AdmissionQueue(config, self._best_cached_tokens)
        self._solitary = SolitaryRequests()
        self._pools = ReplicaPools(config, self._solitary)
        self._index = PrefixIndex()
        self._ledger = BookingLedger()
        self._prior = Rates(
            prefill_tokens_per_s=config.prior_prefill_tokens_per_s,
            decode_step_s=config.prior_decode_step_s,
            transfer_tokens_per_s=config.prior_transfer_tokens_per_s,
        )
        self._rates = PoolRates(self._prior)
        self._counters = RoutingCounters()
        self._shedding = Shedding(model, config, self._queue, self._counters, self._capacity)
        self._output_tokens = float(config.expected_output_tokens)
        self._answers: list[Rejection] = []
        self._expire_at_s = 0.0
        self._closed_until_s: float | None = None  # no replica takes work before this time, unless something changes
        self._closed_for = inf  # the most urgent priority for which that holds
        self._last_open: ReplicaState | None = None  # where `_has_open` looks first
        self._num_decisions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + len(self._solitary)

    @property
    def num_serving(self) -> int:
        """Replicas that neither drain nor hang."""
        return self._pools.num_serving

    @property
    def num_replicas(self) -> int:
        return len(self._pools)

    def has(self, request_id: str) -> bool:
        return request_id in self._queue or request_id in self._ledger or request_id in self._solitary

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
        if not request.attempt:
            is_admitted, rejections = self._shedding.admit(request, has_replicas=len(self._pools) > 0)
            self._answers += rejections
            if not is_admitted:
                return
        self._queue.submit(request, now_s, request.num_prompt_tokens / self._typical_prefill_tokens_per_s)
        if self._priority_of(request) < self._closed_for:
            self._closed_until_s = None

    def step(self, now_s: float) -> list[Decision | Rejection]:
        answers: list[Decision | Rejection] = list(self._answers)
        self._answers.clear()
        if now_s >= self._expire_at_s:
            self._expire(now_s)
            self._expire_at_s = now_s + self._config.booking_expiry_s / 10
        if len(self._solitary):
            answers += self._dispatch_solitary(now_s)
        if not len(self._pools):
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
        self.release_prefill(request_id, now_s)
        booking = self._ledger.take(request_id)
        if booking is None:
            return
        self._end(booking, now_s)
        if num_output_tokens is not None:
            self._output_tokens += 0.05 * (num_output_tokens / booking.request.num_choices - self._output_tokens)
            self._queue.charge(booking.request, self._config.fair_output_weight * (num_output_tokens - booking.num_charged_tokens))

    def release_prefill(self, request_id: str, now_s: float) -> None:
        booking = self._ledger.take_prefill(request_id)
        if booking is not None:
            self._end(booking, now_s)

    def apply_report(self, report: ReplicaReport, now_s: float) -> ReportReply:
        replica = self._pools.get(report.replica_id)
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
        self._rates.observe(report.replica_id, report.role, report.stats)
        rates = self._rates.rates(report.replica_id, report.role)
        if replica is None:
            replica = ReplicaState(report, now_s, rates)
            self._pools.add(replica)
        else:
            if report.is_draining != replica.is_draining:
                self._pools.note_usable_changed()
            replica.apply_report(report, now_s, rates)
            self._pools.update(replica)
            self._ledger.confirm(report.replica_id, self._index)
        self._note_change(replica, now_s)
        return ReportReply(resync=resync)

    def remove_replica(self, replica_id: str) -> None:
        if self._pools.get(replica_id) is not None:
            self._drop(replica_id)
            self._pools.remove(replica_id)
            self._index.remove(replica_id)
            self._rates.forget(replica_id)
            self._counters.forget_replica(replica_id)
            self._closed_until_s = None

    def set_fenced(self, replica_ids: frozenset[str]) -> None:
        self._pools.set_fenced(replica_ids)
        self._note_usable_changed()

    def requests_of(self, caller: str) -> list[str]:
        waiting = [*(waiting.request for waiting in self._queue), *self._solitary.waiting]
        return [request.request_id for request in (*waiting, *self._ledger.requests) if request.caller == caller]

    def next_wakeup_s(self, now_s: float) -> float | None:
        if self._answers:
            return now_s
        if not len(self._queue):
            return now_s + LOOK_AGAIN_S if len(self._solitary) else None
        if not len(self._pools):
            return min(waiting.submitted_s for waiting in self._queue) + self._config.no_replica_timeout_s
        if self._closed_until_s is not None and self._closed_until_s > now_s:
            return self._closed_until_s
        starts = [start_s for replica in self._pools if (start_s := replica.next_start_s(now_s)) is not None]
        return min([*starts, now_s + LOOK_AGAIN_S])

    def statistics(self) -> RoutingStatistics:
        return RoutingStatistics(
            num_waiting=Counter(self._queue.num_waiting_by_tier()) + Counter(request.priority for request in self._solitary.waiting),
            num_bookings=len(self._ledger),
            num_prefill_bookings=self._ledger.num_prefills,
            num_replicas=self._pools.count_by_state(),
            num_usable_by_pool=self._pools.count_usable_by_pool(),
            num_decisions=dict(self._counters.decisions),
            num_plans=dict(self._counters.plans),
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
            "num_plans": dict(self._counters.plans),
            "num_rejections": self._counters.rejections.total(),
            "num_bookings": len(self._ledger),
            "num_prefill_bookings": self._ledger.num_prefills,
            "num_usable_by_pool": dict(self._pools.count_usable_by_pool()),
            "num_index_blocks": self._index.num_nodes,
            "drain_tokens_per_s": round(self._shedding.drain_tokens_per_s, 1),
            "expected_output_tokens": round(self._output_tokens, 1),
            "tiers": self._queue.describe(),
            "replicas": {
                replica.replica_id: {**replica.describe(now_s), "num_cached_blocks": self._index.num_blocks(replica.replica_id)}
                for replica in self._pools
            },
        }

    def _dispatch(self, now_s: float) -> list[Decision | Rejection]:
        answers: list[Decision | Rejection] = []
        held: list[Waiting] = []
        wanted: list[ReplicaState] = []
        while len(held) < self._config.lookahead and (waiting := self._queue.peek(now_s)) is not None:
            request = waiting.request
            places = self._still_wanted(waiting, now_s)
            if not places and (snapshot := self._snapshot(request, now_s)) is not None:
                seed = self._config.seed + self._num_decisions
                decision = self._policy.choose(request, snapshot, seed)
                places = self._places(decision)
                num_uncached = max(1, request.num_prompt_tokens - decision.num_cached_tokens)
                if self._are_open(places, now_s, request):
                    if self._sink is not None:
                        self._sink(request, snapshot, seed, decision)
                    num_outputs = self._expected_outputs(request)
                    self._queue.dispatch(waiting, num_uncached, num_outputs, now_s)
                    self._shedding.note_dispatch(request.num_prompt_tokens, now_s)
                    self._book(request, places, num_uncached, num_outputs, now_s)
                    answers.append(decision)
                    continue
                waiting.wanted = tuple([replica.replica_id for replica in places])
                waiting.wanted_s, waiting.wanted_tokens = now_s, num_uncached
            self._queue.hold(waiting)
            held.append(waiting)
            if places:
                places[0].held_tokens += waiting.wanted_tokens
                wanted.append(places[0])
            if not self._has_open(now_s, most_urgent := self._most_urgent()):
                self._closed_until_s = None
                self._closed_until_s, self._closed_for = self.next_wakeup_s(now_s), most_urgent
                break
        self._queue.restore(held)
        for replica in wanted:
            replica.held_tokens = 0
        return answers

    def _places(self, decision: Decision) -> tuple[ReplicaState, ...]:
        """The replica that computes the prompt, and the one that goes on if it is another."""
        if decision.prefill_replica_id is None:
            return (self._pools[decision.replica_id],)
        return self._pools[decision.prefill_replica_id], self._pools[decision.replica_id]

    def _still_wanted(self, waiting: Waiting, now_s: float) -> tuple[ReplicaState, ...]:
        """The replicas that the request was found to wait for a moment ago; none when it must be decided (again)."""
        if not waiting.wanted or now_s - waiting.wanted_s > _REDECIDE_S:
            return ()
        places = tuple([replica for replica_id in waiting.wanted if (replica := self._pools.get(replica_id)) is not None])
        if len(places) < len(waiting.wanted) or self._are_open(places, now_s, waiting.request):
            return ()
        return places if all(self._pools.is_usable(replica) for replica in places) else ()

    def _is_open(self, replica: ReplicaState, now_s: float, priority: float) -> bool:
        """Whether the replica takes requests of `priority`: those that wait there and are less urgent do not count."""
        limit = self._config.dispatch_ahead
        return limit is None or replica.num_waiting(now_s, priority) < limit

    def _are_open(self, places: tuple[ReplicaState, ...], now_s: float, request: RoutingRequest) -> bool:
        return all(self._is_open(replica, now_s, self._priority_of(request)) for replica in places)

    def _has_open(self, now_s: float, priority: float) -> bool:
        if self._last_open is None or not self._is_open(self._last_open, now_s, priority):
            self._last_open = next((replica for replica in self._pools if self._is_open(replica, now_s, priority)), None)
        return self._last_open is not None

    def _priority_of(self, request: RoutingRequest) -> float:
        """Without an order by priority nobody passes, so a request counts as the least urgent."""
        return request.priority if "priority" in self._config.orders else inf

    def _most_urgent(self) -> float:
        return min(self._queue.num_waiting_by_tier()) if "priority" in self._config.orders else inf

    def _note_change(self, replica: ReplicaState, now_s: float) -> None:
        """What is known of one replica has changed: while all were full, only this one can have opened, or may open sooner."""
        if self._closed_until_s is None:
            return
        if self._is_open(replica, now_s, self._closed_for):
            self._closed_until_s = None
        elif (start_s := replica.next_start_s(now_s)) is not None:
            self._closed_until_s = min(self._closed_until_s, start_s)

    def _snapshot(self, request: RoutingRequest, now_s: float) -> ClusterSnapshot | None:
        """Replicas that may take the request, as the policy is to see them; None when all of them drain."""
        cached = self._index.match(request.block_keys)
        pending = self._ledger.match_pending(request.block_keys)
        num = None if self._policy.examines_all else self._config.max_candidates
        return self._pools.snapshot(request, now_s, cached, pending, num)

    def _dispatch_solitary(self, now_s: float) -> list[Decision]:
        """Decisions on requests whose replica is empty now. Nothing to choose and nothing to predict: it waits for nobody."""
        reserved = self._solitary.reserved
        usable = [state for state in self._pools if not (state.is_draining or state.is_fenced)]
        decisions = []
        for request, replica in self._solitary.take_ready(usable):
            depth = self._index.match(request.block_keys).get(replica.replica_id, 0)
            num_cached = min(depth * replica.block_size, request.num_prompt_tokens)
            num_uncached = max(1, request.num_prompt_tokens - num_cached)
            self._book(request, (replica,), num_uncached, self._expected_outputs(request), now_s)
            predicted_s = num_uncached / replica.prefill_tokens_per_s
            decisions.append(
                Decision(
                    request_id=request.request_id,
                    replica_id=replica.replica_id,
                    replica_role=replica.role,
                    predicted_ttft_s=predicted_s,
                    num_cached_tokens=num_cached,
                    candidates=(CandidateScore(replica.replica_id, predicted_s, ("alone",), (predicted_s,)),),
                )
            )
        if self._solitary.reserved != reserved:
            self._note_usable_changed()
        return decisions

    def _note_usable_changed(self) -> None:
        self._pools.note_usable_changed()
        self._closed_until_s = None

    def _expected_outputs(self, request: RoutingRequest) -> int:
        return min(request.max_tokens, round(self._output_tokens) * request.num_choices)

    def _book(self, request: RoutingRequest, places: tuple[ReplicaState, ...], num_uncached: int, num_outputs: int, now_s: float) -> None:
        self._ledger.book(request, places, num_uncached, num_outputs, now_s)
        for replica in places:
            self._pools.update(replica)
        self._num_decisions += 1
        self._counters.note_decision(request, places[0].replica_id, max(0, request.num_prompt_tokens - num_uncached))
        self._counters.plans["pair" if len(places) > 1 else places[0].role] += 1

    def _end(self, booking: Booking, now_s: float) -> None:
        replica = self._pools.get(booking.replica_id)
        if replica is not None and replica.epoch == booking.epoch:
            replica.release(booking)
            self._note_change(replica, now_s)

    def _drop(self, replica_id: str) -> None:
        """The replica, or its epoch, is gone, and with it all that was booked there."""
        self._last_open = None
        self._ledger.drop_replica(replica_id)

    def _expire(self, now_s: float) -> None:
        self._ledger.postpone(now_s)
        for replica in self._pools:
            for booking in replica.expire(now_s, self._config.booking_expiry_s):
                logger.warning("request %s: no report of %s shows it; its booking expired", booking.request.request_id, replica.replica_id)
                self._ledger.forget_prefix(booking)
        for request_id in self._ledger.booked_before(now_s - self._config.lease_s):
            self.release(request_id, now_s)

    def _reject_unserved(self, now_s: float) -> list[Rejection]:
        timeout_s = self._config.no_replica_timeout_s
        overdue = [waiting.request for waiting in self._queue if now_s - waiting.submitted_s >= timeout_s]
        for request in overdue:
            self._queue.cancel(request.request_id)
        return self._shedding.reject_unserved([*overdue, *self._solitary.take_older_than(now_s - timeout_s)])

    @property
    def _typical_prefill_tokens_per_s(self) -> float:
        return self._rates.typical_prefill_tokens_per_s("prefill" if self._pools.has_prefill_pool else "unified")

    def _capacity(self) -> float:
        """Prompt tokens a second that the replicas whose work it is could prefill together."""
        total = sum([replica.prefill_tokens_per_s for replica in self._pools if replica.role != "decode"])
        return total or sum([replica.prefill_tokens_per_s for replica in self._pools]) or self._prior.prefill_tokens_per_s

    def _best_cached_tokens(self, request: RoutingRequest) -> int:
        depths = self._index.match(request.block_keys)
        return max((depth * self._pools[replica_id].block_size for replica_id, depth in depths.items()), default=0)
