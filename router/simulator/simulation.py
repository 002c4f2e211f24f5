"""Replays a trace: discrete events around the same router, scheduler and block pool classes as in production."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

from replicas.engine_config import Role
from replicas.request import FinishReason, GenerationRequest, RequestKey
from replicas.sampling_params import SamplingParams
from replicas.scheduling.scheduler_config import SchedulerConfig
from replicas.stats import ReplicaReport
from router.config import RouterConfig
from router.policies.policy import Policy
from router.policies.recording import DecisionSink
from router.router import Router
from router.simulator.handoffs import SimulatedHandoffs
from router.simulator.hardware import StepTimer
from router.simulator.outcome import RequestOutcome
from router.simulator.replica import SimulatedReplica, SimulatedStep
from router.simulator.traces import TraceRequest
from router.snapshot import Decision, RoutingRequest

MAX_REPORTS_PER_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """One run's settings."""

    num_replicas: int = 4
    num_prefill_replicas: int = 0
    """Replicas in the prefill pool; the others are the decode pool. 0: no pools."""
    transfer_bytes_per_s: float = 50e9
    """Rate of KV from one prefill replica to one decode replica; the default is 400 Gbit/s, the network card of one GPU."""
    num_blocks: int = 5_000
    """KV blocks per replica."""
    block_size: int = 512
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2_048
    """Token budget of a step; 2,048 keeps steps of an 8B model on an H100 under the TPOT limit."""
    max_num_mixed_tokens: int | None = None
    """Token budget of a step in which requests decode (engines measure it by default); None: `max_num_batched_tokens`."""
    max_urgent_share: float = 0.8
    """Largest share of the work for which decodes step aside for more urgent prompts, as in `EngineConfig`; 0: never."""
    max_urgent_pause_s: float = 1.0
    """Longest time for which a decode steps aside."""
    prefill_max_num_batched_tokens: int | None = None
    """Token budget of a step in the prefill pool, where no decode waits for a step; None: `max_num_batched_tokens`."""
    speedup: float = 1.0
    """Factor by which arrivals are faster than in the trace."""
    report_interval_s: float = 0.1
    """Shortest time between two reports of a replica; grows so that all replicas together send at most 300 per second."""
    dispatch_s: float = 0.002
    """Time from the router's decision to the engine."""
    report_s: float = 0.001
    """Time from the engine to the router."""
    ttft_limit_s: float = 2.0
    ttft_limit_s_per_token: float = 0.001
    """Added to `ttft_limit_s` for each prompt token that no earlier request of the trace had as a prefix."""
    tpot_limit_s: float = 0.1
    has_deadlines: bool = True
    """Whether requests carry their TTFT limit as a deadline."""
    draft_acceptance: tuple[float, ...] = ()
    """Chances that a replica's first draft is accepted, the second if the first was, and so on, the last for all behind it. Empty: no
    speculation. How many are drafted is decided by the engine's controller, from the cost of rows on the device."""
    max_drafts: int = 8
    """Most drafts of a request in one step."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.num_prefill_replicas < self.num_replicas:
            raise ValueError(f"num_prefill_replicas must leave one of {self.num_replicas} to decode, got {self.num_prefill_replicas}")
        if not 0 <= self.max_urgent_share < 1:
            raise ValueError(f"max_urgent_share must be at least 0 and below 1, got {self.max_urgent_share}")
        if any(not 0 <= chance <= 1 for chance in self.draft_acceptance):
            raise ValueError(f"draft_acceptance must be chances from 0 to 1, got {self.draft_acceptance}")
        if self.max_drafts < 1:
            raise ValueError(f"max_drafts must be at least 1, got {self.max_drafts}")
        if self.transfer_bytes_per_s <= 0:
            raise ValueError(f"transfer_bytes_per_s must be above 0, got {self.transfer_bytes_per_s}")


@dataclass(slots=True)
class SimulationResult:
    """The outcomes and statistics of a run."""

    outcomes: list[RequestOutcome]
    replicas: list[SimulatedReplica]
    end_s: float
    decision_s: list[float] = field(default_factory=list)
    """Wall-clock seconds of each `Router.step` that dispatched, divided by the number of its decisions."""
    plans: Counter[str] = field(default_factory=Counter)
    """plan (pair, or the role of the only replica) -> decisions"""
    num_moved_tokens: int = 0
    """Tokens whose KV was moved between replicas."""
    moving_s: float = 0.0
    """Time spent moving KV, summed over all links."""


class Simulation:
    """Owns the simulated clock and the events. Deterministic: the same trace, configuration and seed give the same outcomes."""

    def __init__(
        self,
        config: SimulationConfig,
        router_config: RouterConfig,
        policy: Policy,
        timer: StepTimer,
        sink: DecisionSink | None = None,
    ) -> None:
        self._config = config
        self._router = Router(router_config, policy, sink)
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._wakeup_s: float | None = None
        self._outcomes: dict[str, RequestOutcome] = {}
        self._trace: dict[str, TraceRequest] = {}
        self._num_open = 0
        self._decision_s: list[float] = []
        # The model's limit is the pool's size, so that the scheduler itself rejects requests that exceed the pool.
        max_model_len = config.num_blocks * config.block_size
        scheduler_config = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
            max_num_mixed_tokens=config.max_num_mixed_tokens,
            max_urgent_share=config.max_urgent_share,
            max_urgent_pause_s=config.max_urgent_pause_s,
            max_model_len=max_model_len,
        )
        num_prefill_tokens = max(config.prefill_max_num_batched_tokens or config.max_num_batched_tokens, config.max_num_seqs)
        prefill_config = replace(scheduler_config, max_num_batched_tokens=num_prefill_tokens)
        num_prefill = config.num_prefill_replicas
        second: Role = "decode" if num_prefill else "unified"
        roles: list[Role] = ["prefill" if number < num_prefill else second for number in range(config.num_replicas)]
        width = len(str(config.num_replicas - 1))
        self._replicas: dict[str, SimulatedReplica] = {}
        for number, role in enumerate(roles):
            settings = prefill_config if role == "prefill" else scheduler_config
            replica_id = f"r{number:0{width}}"
            self._replicas[replica_id] = SimulatedReplica(
                replica_id,
                "model",
                timer,
                settings,
                config.num_blocks,
                config.block_size,
                role,
                draft_acceptance=config.draft_acceptance,
                max_drafts=config.max_drafts,
                seed=config.seed + number,
            )
        self._targets: dict[RequestKey, tuple[GenerationRequest, SimulatedReplica]] = {}  # pairs: request and its decode replica
        token_s = timer.model.kv_bytes_per_token / config.transfer_bytes_per_s
        self._handoffs = SimulatedHandoffs(token_s, self._at, self._wake)
        self._plans: Counter[str] = Counter()
        self._report_every_s = max(config.report_interval_s, config.num_replicas / MAX_REPORTS_PER_S)

    def run(self, trace: Sequence[TraceRequest], on_progress: Callable[[int], None] | None = None) -> SimulationResult:
        """Runs until every request has ended. `on_progress` is called with the number of ended requests."""
        for number, replica in enumerate(self._replicas.values()):
            # the first reports come before the first arrival, later ones are spread over the interval
            self._router.apply_report(replica.report(), 0.0)
            self._at(self._report_every_s * (number + 1) / len(self._replicas), partial(self._report, replica))
        for request in trace:
            self._trace[request.request_id] = request
            self._at(request.arrival_s / self._config.speedup, partial(self._arrive, request))
        self._num_open = len(trace)
        reported = self._num_open
        while self._num_open:
            assert self._events, "requests are left, but nothing will ever happen"
            at_s = self._events[0][0]
            self._now_s = at_s
            while self._events and self._events[0][0] == at_s:
                heapq.heappop(self._events)[2]()
            self._step_router()
            if on_progress is not None and reported - self._num_open >= 100:
                reported = self._num_open
                on_progress(len(trace) - reported)
        return SimulationResult(
            outcomes=[self._outcomes[request.request_id] for request in trace],
            replicas=list(self._replicas.values()),
            end_s=self._now_s,
            decision_s=self._decision_s,
            plans=self._plans,
            num_moved_tokens=self._handoffs.num_moved_tokens,
            moving_s=self._handoffs.moving_s,
        )

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, self._num_events, action))
        self._num_events += 1

    def _arrive(self, request: TraceRequest) -> None:
        config = self._config
        limit_s = config.ttft_limit_s + config.ttft_limit_s_per_token * request.num_new_tokens
        self._outcomes[request.request_id] = RequestOutcome(
            request_id=request.request_id,
            tenant=request.tenant,
            priority=request.priority,
            arrival_s=self._now_s,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            ttft_limit_s=limit_s,
            tpot_limit_s=config.tpot_limit_s,
        )
        self._router.submit(
            RoutingRequest(
                request_id=request.request_id,
                model="model",
                num_prompt_tokens=request.num_prompt_tokens,
                max_tokens=2_048,  # a client's limit, not the actual length in the trace
                block_keys=request.block_keys,
                priority=request.priority,
                tenant=request.tenant,
                deadline_s=self._now_s + limit_s if config.has_deadlines else None,
                arrival_s=self._now_s,
            ),
            self._now_s,
        )

    def _step_router(self) -> None:
        started_s = perf_counter()
        answers = self._router.step(self._now_s)
        elapsed_s = perf_counter() - started_s
        decisions = [answer for answer in answers if isinstance(answer, Decision)]
        if decisions:
            self._decision_s += [elapsed_s / len(decisions)] * len(decisions)
        for answer in answers:
            outcome = self._outcomes[answer.request_id]
            if isinstance(answer, Decision):
                outcome.dispatch_s = self._now_s
                outcome.replica_id = answer.replica_id
                outcome.prefill_replica_id = answer.prefill_replica_id
                self._plans[answer.replica_role if answer.prefill_replica_id is None else "pair"] += 1
                outcome.predicted_ttft_s = answer.predicted_ttft_s
                self._at(self._now_s + self._config.dispatch_s, partial(self._reach, answer))
            else:
                outcome.is_rejected = True
                outcome.retry_after_s = answer.retry_after_s
                self._num_open -= 1
        wakeup_s = self._router.next_wakeup_s(self._now_s) if self._router.num_waiting else None
        if wakeup_s is not None and (self._wakeup_s is None or wakeup_s < self._wakeup_s or self._wakeup_s <= self._now_s):
            self._wakeup_s = max(wakeup_s, self._now_s + 1e-6)
            self._at(self._wakeup_s, _nothing)

    def _reach(self, decision: Decision) -> None:
        """A dispatched request arrives at its engine; for a pair, at the one that computes the prompt."""
        asked = self._trace[decision.request_id]
        replica = self._replicas[decision.prefill_replica_id or decision.replica_id]
        request = GenerationRequest(
            request_id=asked.request_id,
            prompt_ids=asked.prompt_ids(),
            params=SamplingParams(max_tokens=asked.num_output_tokens, ignore_eos=True),
            seed=0,
            priority=asked.priority,
            tenant=asked.tenant,
        )
        if decision.prefill_replica_id is None:
            replica.add(request)
        else:
            self._targets[request.key] = request, self._replicas[decision.replica_id]
            replica.add(replace(request, wants_handoff=True))
        self._wake(replica)

    def _reach_target(self, key: RequestKey) -> None:
        """A pair's request arrives at its decode replica, after the first chunk of the prompt was computed."""
        request, target = self._targets.pop(key)
        if request.request_id in self._trace:
            target.add_handoff(request)
            self._wake(target)

    def _wake(self, replica: SimulatedReplica) -> None:
        if not replica.is_stepping:
            self._begin(replica)

    def _begin(self, replica: SimulatedReplica) -> None:
        step_s = replica.begin_step(self._now_s)
        if step_s is not None:
            self._at(self._now_s + step_s, partial(self._finish, replica))
        for key, num_cached in replica.take_loads():
            self._handoffs.note_room(key, num_cached, self._now_s)

    def _finish(self, replica: SimulatedReplica) -> None:
        result = replica.finish_step()
        for key, num_computed in result.readable:
            self._note_readable(replica, key, num_computed)
        self._record(replica, result)
        self._wake(replica)

    def _note_readable(self, source: SimulatedReplica, key: RequestKey, num_computed: int) -> None:
        outcome = self._outcomes[key.request_id]
        assert outcome.replica_id is not None, "a request runs that was never dispatched"
        target = self._replicas[outcome.replica_id]
        if self._handoffs.note_computed(key, num_computed, outcome.num_prompt_tokens, source, target, self._now_s):
            self._at(self._now_s + self._config.dispatch_s, partial(self._reach_target, key))

    def _record(self, replica: SimulatedReplica, result: SimulatedStep) -> None:
        for progress in result.progress:
            if progress.key.request_id not in self._trace:
                continue  # cancelled here, because it ended with its first token on the prefill replica
            outcome = self._outcomes[progress.key.request_id]
            if outcome.first_token_s is None:
                outcome.first_token_s = self._now_s
                outcome.num_cached_tokens = progress.num_cached_tokens
            if progress.finish_reason is FinishReason.HANDOFF:
                self._router.release_prefill(progress.key.request_id, self._now_s)
            elif progress.finish_reason is not None:
                self._handoffs.drop(progress.key)
                outcome.end_s = self._now_s
                self._router.release(progress.key.request_id, self._now_s, outcome.num_output_tokens)
                self._num_open -= 1
                del self._trace[progress.key.request_id]

    def _report(self, replica: SimulatedReplica) -> None:
        if replica.has_changed:
            report = replica.report()
            self._at(self._now_s + self._config.report_s, partial(self._deliver, replica, report))
        self._at(self._now_s + self._report_every_s, partial(self._report, replica))

    def _deliver(self, replica: SimulatedReplica, report: ReplicaReport) -> None:
        if self._router.apply_report(report, self._now_s).resync:
            replica.request_full_state()


def _nothing() -> None:
    """The action of a wake-up event: the router is stepped after every event."""
