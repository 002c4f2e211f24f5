"""A simulated replica: the engine's scheduler and block pool, with a roofline in place of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcache.block_pool import BlockPool
from kvcache.events import KVEventLog
from replicas.engine.step_statistics import StepStatistics
from replicas.engine_config import Role
from replicas.handoff.transfer_rate import TransferRate
from replicas.request import GenerationRequest, RequestKey, RequestProgress, StepOutput
from replicas.scheduling.scheduler import Scheduler
from replicas.scheduling.scheduler_config import SchedulerConfig
from replicas.scheduling.step_plan import StepPlan
from replicas.scheduling.tier_loads import tier_loads
from replicas.stats import ReplicaReport, ReplicaStats
from router.simulator.drafts import OUTPUT_TOKEN, simulated_speculator, verified
from router.simulator.hardware import StepTimer

_EVENT_CAPACITY = 4_096
"""Enough for the changes between two reports; a replica that exceeds it resyncs, as in production."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """The result of a finished step."""

    progress: tuple[RequestProgress, ...]
    readable: tuple[tuple[RequestKey, int], ...] = ()
    """Requests that hand over their KV, with their number of computed tokens."""


class SimulatedReplica:
    """Owns one scheduler and pool. `begin_step` plans a step and returns its duration; `finish_step` returns its tokens."""

    def __init__(
        self,
        replica_id: str,
        model: str,
        timer: StepTimer,
        scheduler_config: SchedulerConfig,
        num_blocks: int,
        block_size: int,
        role: Role = "unified",
        *,
        draft_acceptance: Sequence[float] = (),
        max_drafts: int = 8,
        seed: int = 0,
    ) -> None:
        """`draft_acceptance` are the chances that drafts are accepted, by depth; empty: none are made. `max_drafts` is the most of a
        request and step."""
        self.replica_id = replica_id
        self.model = model
        self.role = role
        self._timer = timer
        self._config = scheduler_config
        self.pool = BlockPool(num_blocks, block_size, KVEventLog(capacity=_EVENT_CAPACITY))
        self.scheduler = Scheduler(scheduler_config, self.pool)
        max_rows = scheduler_config.max_num_seqs + max_drafts
        self._speculator = simulated_speculator(
            draft_acceptance, timer, self.scheduler.drafts, max_rows=max_rows, max_tokens=max_drafts, seed=seed
        )
        self._plan: StepPlan | None = None
        self._plan_s = 0.0
        self._reported_event = 0
        self._needs_full_state = False
        self._statistics = StepStatistics(scheduler_config.max_urgent_share)
        self._transfer_rate = TransferRate()
        self._lent: dict[RequestKey, list[int]] = {}  # request -> blocks that another replica reads
        self._arrived: list[tuple[RequestKey, int]] = []  # loads that end before the next step, with their number of tokens
        self.busy_s = 0.0
        self.has_changed = True  # since the last report

    @property
    def is_stepping(self) -> bool:
        return self._plan is not None

    def add(self, request: GenerationRequest) -> None:
        self.scheduler.add(request)
        self.has_changed = True

    def add_handoff(self, request: GenerationRequest) -> None:
        """Adds a request whose prompt another replica computes: it waits for room, then for `note_arrived`."""
        self.add(request)
        self.scheduler.expect_load(request.key)

    def take_loads(self) -> list[tuple[RequestKey, int]]:
        """Requests of `add_handoff` that got room since the last call, with their number of cached tokens."""
        return [(state.key, state.num_computed_tokens) for state in self.scheduler.take_loads()]

    def note_arrived(self, key: RequestKey, num_tokens: int, num_moved: int, moving_s: float) -> None:
        """Records that a request's KV has arrived: it decodes from the next step on."""
        self._arrived.append((key, num_tokens))
        self._transfer_rate.add(num_moved, moving_s)
        self.has_changed = True

    def return_blocks(self, key: RequestKey) -> None:
        """Releases the blocks of a request whose KV is no longer read."""
        self.pool.release(self._lent.pop(key))
        self.has_changed = True

    def cancel(self, key: RequestKey) -> bool:
        self.has_changed = True
        return self.scheduler.cancel(key)

    def begin_step(self, now_s: float = 0.0) -> float | None:
        """Plans a step that begins at `now_s`, and returns its seconds; None when there is nothing to run."""
        assert self._plan is None, "a step is under way"
        for key, num_tokens in self._arrived:
            self.scheduler.end_load(key, num_tokens, (OUTPUT_TOKEN,))
        self._arrived.clear()
        while self.scheduler.has_work:
            plan = self.scheduler.schedule(now_s)
            if plan.chunks:
                if self._speculator is not None:
                    plan = self._speculator.extend(plan)
                self._plan = plan
                self._plan_s = self._step_s(plan)
                return self._plan_s
            self._statistics.add(StepOutput(num_preemptions=plan.num_preemptions))
            if not plan.num_preemptions:
                break
        self._statistics.add(StepOutput(progress=tuple(self.scheduler.take_ended())))
        return None

    def finish_step(self) -> SimulatedStep:
        plan = self._plan
        assert plan is not None, "no step is under way"
        self._plan = None
        readable = self._lend(plan)
        progress = self.scheduler.update(plan, [verified(chunk) for chunk in plan.chunks if chunk.samples])
        if self._speculator is not None:
            progress = self._speculator.observe(plan, progress)
        self.busy_s += self._plan_s
        num_prefill = plan.num_prefill_tokens
        self._statistics.add(
            StepOutput(
                progress=tuple(progress),
                num_prefill_tokens=num_prefill,
                num_decode_tokens=plan.num_tokens - num_prefill,
                num_drafts=sum(len(chunk.draft_ids) for chunk in plan.chunks),
                num_preemptions=plan.num_preemptions,
                num_paused=plan.num_paused,
                cuts_a_prompt=plan.cuts_a_prompt,
                step_s=self._plan_s,
            )
        )
        self.has_changed = True
        return SimulatedStep(progress=tuple(progress), readable=readable)

    def request_full_state(self) -> None:
        """Makes the next report list every block, because the router missed events."""
        self._needs_full_state = True

    def report(self) -> ReplicaReport:
        """The report that the engine would push now."""
        self.has_changed = False
        log = self.pool.events
        first_event = self._reported_event
        events = None if self._needs_full_state else log.since(first_event)
        is_full_state = events is None
        if events is None:
            first_event, events = log.next_number, self.pool.stored_blocks()
        self._reported_event = log.next_number
        self._needs_full_state = False
        return ReplicaReport(
            replica_id=self.replica_id,
            model=self.model,
            epoch=1,
            stats=self.stats(),
            block_size=self.pool.block_size,
            max_num_seqs=self._config.max_num_seqs,
            first_event=first_event,
            events=events,
            is_full_state=is_full_state,
            role=self.role,
        )

    def stats(self) -> ReplicaStats:
        """Load, counters and rates as `replicas.engine.engine.Engine` reports them."""
        pool = self.pool.statistics()
        running, waiting = self.scheduler.running, self.scheduler.waiting
        tiers = tier_loads(running, waiting)
        return replace(
            self._statistics.snapshot(),
            transfer_tokens_per_s=self._transfer_rate.tokens_per_s,
            num_running=len(running),
            num_waiting=len(waiting),
            num_uncomputed_tokens=sum(tier.num_uncomputed_tokens for tier in tiers),
            num_context_tokens=sum(tier.num_context_tokens for tier in tiers),
            tiers=tiers,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            drafts=() if self._speculator is None else self._speculator.statistics(),
            speculation_gain=None if self._speculator is None else self._speculator.controller.predicted_gain,
        )

    def _lend(self, plan: StepPlan) -> tuple[tuple[RequestKey, int], ...]:
        """Retains the blocks of requests that hand over their KV, before the step's result can end them."""
        readable: list[tuple[RequestKey, int]] = []
        for chunk in plan.chunks:
            if not chunk.state.request.wants_handoff:
                continue
            key = chunk.state.key
            if key not in self._lent:
                self._lent[key] = list(chunk.state.block_ids)
                for block_id in self._lent[key]:
                    self.pool.retain(block_id)
            readable.append((key, chunk.start + chunk.num_tokens))
        return tuple(readable)

    def _step_s(self, plan: StepPlan) -> float:
        num_attended = 0.0
        num_context = 0
        num_tokens = 0
        for chunk in plan.chunks:
            num_tokens += chunk.num_tokens
            num_attended += chunk.num_tokens * (chunk.start + (chunk.num_tokens + 1) / 2)
            num_context += chunk.start + chunk.num_tokens
        return self._timer.step_s(num_tokens, num_attended, num_context)
