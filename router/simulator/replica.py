"""A replica whose engine is real but for the model: its own scheduler and block pool, and a clock that a roofline moves."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.block_pool import BlockPool
from kvcache.events import KVEventLog
from replicas.engine_config import Role
from replicas.request import FinishReason, GenerationRequest, RequestKey, RequestProgress
from replicas.scheduling.scheduler import Scheduler, SchedulerConfig
from replicas.scheduling.step_plan import StepPlan
from replicas.stats import ReplicaReport, ReplicaStats
from router.simulator.hardware import StepTimer

_EVENT_CAPACITY = 4_096
"""Enough for the changes between two reports; a replica that outruns it resyncs, as live."""

OUTPUT_TOKEN = -1
"""Every generated token. It never equals a trace's, so nothing generated is found as somebody's prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a finished step gave."""

    progress: tuple[RequestProgress, ...]
    step_s: float
    readable: tuple[tuple[RequestKey, int], ...] = ()
    """Requests that hand over their KV, with how many of their tokens are computed now."""


class SimulatedReplica:
    """Owns one scheduler and pool. `begin_step` plans and says how long it takes, `finish_step` brings the tokens."""

    def __init__(
        self,
        replica_id: str,
        model: str,
        timer: StepTimer,
        scheduler_config: SchedulerConfig,
        num_blocks: int,
        block_size: int,
        role: Role = "unified",
    ) -> None:
        self.replica_id = replica_id
        self.model = model
        self.role = role
        self._timer = timer
        self._config = scheduler_config
        self.pool = BlockPool(num_blocks, block_size, KVEventLog(capacity=_EVENT_CAPACITY))
        self.scheduler = Scheduler(scheduler_config, self.pool)
        self._plan: StepPlan | None = None
        self._plan_s = 0.0
        self._reported_event = 0
        self._needs_full_state = False
        self._prefill_tokens: float | None = None  # of steps that prefill, smoothed; so is their time
        self._prefill_s: float | None = None
        self._decode_step_s: float | None = None
        self._transfer_tokens_per_s: float | None = None
        self._lent: dict[RequestKey, list[int]] = {}  # blocks that another replica reads
        self._arrived: list[tuple[RequestKey, int]] = []  # loads that end before the next step, with their tokens
        self.num_steps = 0
        self.busy_s = 0.0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.num_preemptions = 0
        self._num_finished = 0
        self._num_cancelled = 0
        self.has_changed = True  # since the last report

    @property
    def is_stepping(self) -> bool:
        return self._plan is not None

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens of ended requests that were computed, not found."""
        return self.num_prompt_tokens - self.num_cached_tokens

    def add(self, request: GenerationRequest) -> None:
        self.scheduler.add(request)
        self.has_changed = True

    def add_handoff(self, request: GenerationRequest) -> None:
        """A request whose prompt another replica computes: it waits for room, then for `note_arrived`."""
        self.add(request)
        self.scheduler.expect_load(request.key)

    def take_loads(self) -> list[tuple[RequestKey, int]]:
        """Requests of `add_handoff` that have got room since the last call, with the tokens that were cached."""
        return [(state.key, state.num_computed_tokens) for state in self.scheduler.take_loads()]

    def note_arrived(self, key: RequestKey, num_tokens: int, num_moved: int, moving_s: float) -> None:
        """A request's KV is there: it decodes from the next step on."""
        self._arrived.append((key, num_tokens))
        if moving_s > 0:
            self._transfer_tokens_per_s = _ewma(self._transfer_tokens_per_s, num_moved / moving_s)
        self.has_changed = True

    def return_blocks(self, key: RequestKey) -> None:
        """Nobody reads the request's KV any longer."""
        self.pool.release(self._lent.pop(key))
        self.has_changed = True

    def cancel(self, key: RequestKey) -> bool:
        self.has_changed = True
        return self.scheduler.cancel(key)

    def begin_step(self) -> float | None:
        """Plans a step and returns its seconds; None when there is nothing to run."""
        assert self._plan is None, "a step is under way"
        for key, num_tokens in self._arrived:
            self.scheduler.end_load(key, num_tokens, (OUTPUT_TOKEN,))
        self._arrived.clear()
        while self.scheduler.has_work:
            plan = self.scheduler.schedule()
            self.num_preemptions += plan.num_preemptions
            if plan.chunks:
                self._plan = plan
                self._plan_s = self._step_s(plan)
                return self._plan_s
            if not plan.num_preemptions:
                break
        self._num_cancelled += len(self.scheduler.take_ended())
        return None

    def finish_step(self) -> StepResult:
        plan = self._plan
        assert plan is not None, "no step is under way"
        self._plan = None
        readable = self._lend(plan)
        num_samples = sum(chunk.samples for chunk in plan.chunks)
        progress = self.scheduler.update(plan, [(OUTPUT_TOKEN,)] * num_samples)
        self.num_steps += 1
        self.busy_s += self._plan_s
        num_prefill = plan.num_prefill_tokens
        if num_prefill:
            self._prefill_tokens = _ewma(self._prefill_tokens, num_prefill)
            self._prefill_s = _ewma(self._prefill_s, self._plan_s)
        else:
            self._decode_step_s = _ewma(self._decode_step_s, self._plan_s)
        for item in progress:
            self.num_generated_tokens += len(item.token_ids)
            if item.finish_reason is FinishReason.CANCELLED:
                self._num_cancelled += 1
            elif item.finish_reason is not None:
                self._num_finished += 1
        self.has_changed = True
        return StepResult(progress=tuple(progress), step_s=self._plan_s, readable=readable)

    def count_prompt(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Counts a request's prompt once it is computed."""
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens

    def request_full_state(self) -> None:
        """The router lost track: the next report lists every block."""
        self._needs_full_state = True

    def report(self) -> ReplicaReport:
        """What the engine would push now."""
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
        scheduler, pool = self.scheduler, self.pool.statistics()
        return ReplicaStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_uncomputed_tokens=sum(
                max(0, len(s.request.prompt_ids) - s.num_computed_tokens) for s in scheduler.running if not s.is_loading
            )
            + sum(len(s.token_ids) for s in scheduler.waiting if not s.awaits_load),
            num_context_tokens=sum(s.num_computed_tokens for s in scheduler.running),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            prefill_tokens_per_s=self._prefill_tokens / self._prefill_s if self._prefill_tokens and self._prefill_s else None,
            decode_step_s=self._decode_step_s,
            transfer_tokens_per_s=self._transfer_tokens_per_s,
            num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_preemptions=self.num_preemptions,
            num_finished=self._num_finished,
            num_cancelled=self._num_cancelled,
        )

    def _lend(self, plan: StepPlan) -> tuple[tuple[RequestKey, int], ...]:
        """Holds the blocks of requests that hand over, before the step's result can end them."""
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


def _ewma(old: float | None, new: float, weight: float = 0.1) -> float:
    return new if old is None else old + weight * (new - old)
