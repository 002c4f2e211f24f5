"""The scheduler as a state machine against its invariants."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replicas.request import GenerationRequest, RequestKey, RequestProgress
from replicas.sampling_params import SamplingParams
from replicas.scheduling.step_plan import ScheduledChunk, StepPlan
from tests.unit.scheduler_steps import EOS, new_scheduler


class SchedulerMachine(RuleBasedStateMachine):
    """Random submissions, cancels, failures and steps on a pool that is too small for them all; one to eight drafted tokens for some
    requests, of which any number is accepted.

    The model beside it is the KV content itself: what each block's slots really hold after each step.
    """

    BLOCK_SIZE = 4
    NUM_BLOCKS = 12
    BUDGET = 9
    MIXED_BUDGET = 6
    MAX_URGENT_SHARE = 0.75
    MAX_URGENT_PAUSE_S = 5.0

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = new_scheduler(
            num_blocks=self.NUM_BLOCKS,
            block_size=self.BLOCK_SIZE,
            max_num_seqs=4,
            budget=self.BUDGET,
            max_model_len=40,
            mixed_budget=self.MIXED_BUDGET,
            max_urgent_share=self.MAX_URGENT_SHARE,
            max_urgent_pause_s=self.MAX_URGENT_PAUSE_S,
        )
        self.scheduler.config = replace(self.scheduler.config, max_num_scored_tokens=5)
        self.accepted: list[RequestKey] = []
        self.endings = Counter[RequestKey]()
        self.scored = Counter[tuple[RequestKey, int]]()
        self.num_to_score: dict[RequestKey, int] = {}
        self.now_s = 0.0
        self.pauses: dict[RequestKey, tuple[int, float]] = {}  # paused decode -> tokens computed since its last step, and their begin
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> the whole history written there

    @rule(
        prefix=st.integers(0, 2),
        length=st.integers(1, 20),
        tail=st.integers(0, 3),
        max_tokens=st.integers(1, 25),
        priority=st.integers(0, 2),
        wants_scores=st.booleans(),
    )
    def submit(self, prefix: int, length: int, tail: int, max_tokens: int, priority: int, wants_scores: bool) -> None:
        prompt = tuple([prefix] * length + [10 + tail] * tail)
        name = f"r{len(self.accepted)}"
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0 if wants_scores else None)
        request = GenerationRequest(request_id=name, prompt_ids=prompt, params=params, seed=0, priority=priority)
        self.scheduler.add(request)
        self.num_to_score[request.key] = len(prompt) - 1 if wants_scores else 0
        self.accepted.append(request.key)

    @precondition(lambda self: self.accepted)
    @rule(index=st.integers(0, 10**6))
    def cancel(self, index: int) -> None:
        key = self.accepted[index % len(self.accepted)]
        is_alive = any(s.request.key == key for s in (*self.scheduler.running, *self.scheduler.waiting))
        assert self.scheduler.cancel(key) == is_alive
        self.scheduler.check()

    @rule(elapsed_s=st.floats(0.0, 3.0))
    def wait(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        before = list(self.scheduler.running)
        decoding = {state.request.key for state in before if state.is_decoding}
        plan = self.scheduler.schedule(self.now_s)
        self._check_pauses(plan, decoding)
        drafts = st.lists(st.sampled_from([3, 4, 5, EOS]), min_size=1, max_size=8)
        drafted = [data.draw(drafts) if chunk.state.is_decoding and data.draw(st.booleans()) else [] for chunk in plan.chunks]
        plan = self.scheduler.drafts.extend(plan, drafted)
        prompts = [state for state in self.scheduler.running if state.request.key not in decoding]
        assert not prompts or any(chunk.state is prompts[0] for chunk in plan.chunks), "the most urgent prompt stands still"
        oldest = min(prompts, key=lambda state: state.arrival_number, default=None)
        if oldest in before and oldest is not None and oldest.num_scored >= oldest.num_to_score:
            assert any(chunk.state is oldest for chunk in plan.chunks), "the oldest prompt stands still"
        self._check_budget(plan, decoding)
        self._write(plan)
        self._record(self.scheduler.update(plan, [self._new_ids(chunk, data) for chunk in plan.chunks if chunk.samples]))

    def _new_ids(self, chunk: ScheduledChunk, data: st.DataObject) -> list[int]:
        """Some of the drafts, and what the model says behind them."""
        num_accepted = data.draw(st.integers(0, len(chunk.draft_ids)))
        return [*chunk.draft_ids[:num_accepted], data.draw(st.sampled_from([3, 4, 5, EOS]))]

    @rule()
    def step_that_fails(self) -> None:
        self._record(self.scheduler.fail_step(self.scheduler.schedule(self.now_s), "failed"))

    def _check_pauses(self, plan: StepPlan, decoding: set[RequestKey]) -> None:
        """A decode is left out only for a more urgent prompt, keeps its blocks, and gets its share of the work and of the time."""
        planned = {chunk.state.request.key for chunk in plan.chunks}
        prompts = [chunk for chunk in plan.chunks if chunk.is_prefill]
        decodes = [state for state in self.scheduler.running if state.request.key in decoding]
        paused = [state for state in decodes if state.request.key not in planned]
        assert plan.num_paused >= len(paused), "a decode was left out without a pause"
        pauses, self.pauses = self.pauses, {}
        if not paused:
            return
        most_urgent = min((chunk.state.request.priority for chunk in prompts), default=9)
        less_urgent = [state for state in decodes if state.request.priority > most_urgent]
        allowed = self.MAX_URGENT_SHARE / (1 - self.MAX_URGENT_SHARE) * len(less_urgent)
        for state in paused:
            assert state in less_urgent, "a decode stepped aside for a prompt that is not more urgent"
            assert len(state.block_ids) * self.BLOCK_SIZE >= state.num_computed_tokens == len(state.token_ids) - 1
            work, began_s = pauses.get(state.request.key, (0, self.now_s))
            assert work < allowed or state.request.key not in pauses, "a decode does not get its share of the work"
            assert self.now_s - began_s < self.MAX_URGENT_PAUSE_S, "a decode pauses too long"
            self.pauses[state.request.key] = work + plan.num_tokens, began_s
        priority = min(state.request.priority for state in paused)
        behind = [chunk.num_tokens for chunk in prompts if chunk.state.request.priority >= priority]
        assert sum(behind) <= self.BLOCK_SIZE, "prompts pass decodes that are as urgent"

    def _check_budget(self, plan: StepPlan, decoding: set[RequestKey]) -> None:
        assert sum(chunk.num_tokens for chunk in plan.chunks) <= self.BUDGET
        streaming = [chunk for chunk in plan.chunks if chunk.state.request.key in decoding and chunk.state.num_output_tokens]
        if streaming:
            priority = min(chunk.state.request.priority for chunk in streaming)
            num_decode_tokens = sum(chunk.num_tokens for chunk in streaming)
            held_back = [chunk for chunk in plan.chunks if chunk.is_prefill and chunk.state.request.priority >= priority]
            assert sum(chunk.num_tokens for chunk in held_back) <= max(self.MIXED_BUDGET - num_decode_tokens, self.BLOCK_SIZE)

    def _write(self, plan: StepPlan) -> None:
        """All writes first, then every chunk must find exactly its own history in its blocks."""
        size = self.BLOCK_SIZE
        for chunk in plan.chunks:
            assert chunk.num_tokens >= 1
            for position in chunk.scored:
                assert chunk.start <= position < chunk.start + chunk.num_tokens, "scored without being computed"
                self.scored[chunk.state.request.key, position] += 1
        assert sum(len(chunk.scored) for chunk in plan.chunks) <= 5
        for chunk in plan.chunks:
            tokens = [*chunk.state.token_ids, *chunk.draft_ids]
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                block = chunk.state.block_ids[position // size]
                assert self.scheduler.pool.ref_count(block) == 1 or block in plan.published, "a shared block is written"
                self.slots[block, position % size] = tuple(tokens[: position + 1])
        for chunk in plan.chunks:
            tokens = [*chunk.state.token_ids, *chunk.draft_ids]
            for position in range(chunk.start + chunk.num_tokens):
                block = chunk.state.block_ids[position // size]
                assert self.slots[block, position % size] == tuple(tokens[: position + 1]), "a block holds another history"

    def _record(self, progress: list[RequestProgress]) -> None:
        for item in progress:
            if item.finish_reason is not None:
                self.endings[item.key] += 1
                assert self.endings[item.key] == 1, "a request ended twice"
            if item.token_ids:
                scored = [self.scored[item.key, position] for position in range(self.num_to_score[item.key])]
                assert set(scored) <= {1}, "a position was scored never or twice"
        self.scheduler.check()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.scheduler.check()

    def teardown(self) -> None:
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            plan = self.scheduler.schedule(self.now_s)
            self._write(plan)
            self._record(self.scheduler.update(plan, [[5] for chunk in plan.chunks if chunk.samples]))
        assert set(self.endings) == set(self.accepted), "a request starved"
        assert self.scheduler.pool.num_free == self.NUM_BLOCKS


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
