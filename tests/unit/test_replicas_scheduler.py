"""The scheduler with hand-counted steps, and as a state machine against its invariants."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache.block_pool import BlockPool
from replicas.request import FinishReason, GenerationRequest, RequestKey, RequestProgress, RequestRejected
from replicas.sampling_params import SamplingParams
from replicas.scheduler import Scheduler, SchedulerConfig
from replicas.step_plan import StepPlan

EOS = 99


def _scheduler(
    num_blocks: int = 100,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 32,
    max_model_len: int = 60,
    caching: bool = True,
    mixed_budget: int | None = None,
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_num_mixed_tokens=mixed_budget,
        max_model_len=max_model_len,
        eos_token_ids=frozenset({EOS}),
        enable_prefix_caching=caching,
    )
    return Scheduler(config, BlockPool(num_blocks, block_size))


def _request(name: str, num_prompt: int = 4, *, first: int = 0, priority: int = 0, **params: object) -> GenerationRequest:
    prompt = tuple(first + i for i in range(num_prompt))
    return GenerationRequest(
        request_id=name, prompt_ids=prompt, params=SamplingParams(**{"max_tokens": 8, **params}), seed=0, priority=priority
    )


def _step(scheduler: Scheduler, token: int = 50) -> tuple[StepPlan, list[RequestProgress]]:
    plan = scheduler.schedule()
    progress = scheduler.update(plan, [[token] for chunk in plan.chunks if chunk.samples])
    scheduler.check()
    return plan, progress


def _shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(c.state.request.request_id, c.start, c.num_tokens) for c in plan.chunks]


def test_step_in_which_requests_decode_takes_fewer_tokens_of_prompts() -> None:
    scheduler = _scheduler(budget=32, mixed_budget=10)
    scheduler.add(_request("a", 20))
    assert _shape(_step(scheduler)[0]) == [("a", 0, 20)], "nobody decodes yet"
    scheduler.add(_request("b", 30, first=30))
    assert _shape(_step(scheduler)[0]) == [("a", 20, 1), ("b", 0, 9)]
    scheduler.cancel(RequestKey("a", 0))
    assert _shape(_step(scheduler)[0]) == [("b", 9, 21)], "nobody decodes any more"


def test_prompt_goes_on_by_a_block_beside_more_decodes_than_the_mixed_budget() -> None:
    scheduler = _scheduler(block_size=4, mixed_budget=2)
    for name in "abc":
        scheduler.add(_request(name, 4))
    _step(scheduler)
    scheduler.add(_request("d", 20, first=30))
    for start in (0, 4, 8):
        assert _shape(_step(scheduler)[0])[3:] == [("d", start, 4)]


def test_prompt_more_urgent_than_all_decodes_is_not_held_back() -> None:
    scheduler = _scheduler(budget=32, mixed_budget=10)
    scheduler.add(_request("batch", 4, priority=2))
    _step(scheduler)
    scheduler.add(_request("same", 20, first=30, priority=2))
    scheduler.add(_request("urgent", 20, first=60, priority=1))
    assert _shape(_step(scheduler)[0]) == [("batch", 4, 1), ("urgent", 0, 20), ("same", 0, 9)], "what is left of both budgets"
    scheduler.add(_request("later", 20, first=90, priority=1))
    assert _shape(_step(scheduler)[0]) == [("urgent", 20, 1), ("batch", 5, 1), ("later", 0, 6), ("same", 9, 2)], "an equal one decodes"


def test_oldest_prompt_goes_on_beside_a_flood_of_more_urgent_ones() -> None:
    scheduler = _scheduler(budget=32)
    scheduler.add(_request("old", 50, first=900, priority=1))
    assert _shape(_step(scheduler)[0]) == [("old", 0, 32)]
    for number in range(4):
        scheduler.add(_request(f"urgent {number}", 50, first=100 * number, max_tokens=1))
    steps = [_shape(_step(scheduler)[0]) for _ in range(3)]
    assert steps == [
        [("urgent 0", 0, 28), ("old", 32, 4)],
        [("urgent 0", 28, 22), ("urgent 1", 0, 6), ("old", 36, 4)],
        [("urgent 1", 6, 28), ("old", 40, 4)],
    ]


def test_last_token_of_a_prompt_holds_no_other_prompt_back() -> None:
    scheduler = _scheduler(budget=8, mixed_budget=1)
    scheduler.add(_request("a", 9))
    _step(scheduler)
    scheduler.add(_request("b", 20, first=30))
    assert _shape(_step(scheduler)[0]) == [("a", 8, 1), ("b", 0, 7)]


def test_request_that_computes_nothing_gets_its_blocks_beside_a_full_mixed_step() -> None:
    scheduler = _scheduler(budget=32, mixed_budget=5)
    scheduler.add(_request("a", 4))
    _step(scheduler)
    scheduler.add(_request("b", 40, first=30))
    scheduler.add(_request("pulled", 20, first=80))
    scheduler.expect_load(RequestKey("pulled", 0))
    assert _shape(_step(scheduler)[0]) == [("a", 4, 1), ("b", 0, 4)]
    assert [state.request.request_id for state in scheduler.take_loads()] == ["pulled"]


def test_step_mixes_decode_and_prefill_in_one_budget() -> None:
    scheduler = _scheduler(budget=10)
    scheduler.add(_request("a", 4))
    _step(scheduler)
    scheduler.add(_request("b", 20, first=30))
    plan, _ = _step(scheduler)
    assert _shape(plan) == [("a", 4, 1), ("b", 0, 9)]
    plan, _ = _step(scheduler)
    assert _shape(plan) == [("a", 5, 1), ("b", 9, 9)]
    plan, progress = _step(scheduler)
    assert _shape(plan) == [("a", 6, 1), ("b", 18, 2)]
    assert [p.key.request_id for p in progress if p.token_ids] == ["a", "b"]


def test_length_and_stop_end_a_request_once_with_the_right_reason() -> None:
    scheduler = _scheduler()
    scheduler.add(_request("long", max_tokens=2))
    scheduler.add(_request("stop", first=20))
    _step(scheduler, token=1)
    _, progress = _step(scheduler, token=EOS)
    assert {p.key.request_id: (p.finish_reason, p.stop_token_id) for p in progress} == {
        "long": (FinishReason.STOP, EOS),
        "stop": (FinishReason.STOP, EOS),
    }
    scheduler.add(_request("long", max_tokens=1))
    _, progress = _step(scheduler, token=1)
    assert progress[0].finish_reason is FinishReason.LENGTH
    assert not scheduler.has_work


def test_ignore_eos_goes_on_but_stop_token_ids_still_end() -> None:
    scheduler = _scheduler()
    scheduler.add(_request("a", ignore_eos=True, stop_token_ids=(7,)))
    _, progress = _step(scheduler, token=EOS)
    assert progress[0].finish_reason is None
    _, progress = _step(scheduler, token=7)
    assert progress[0].stop_token_id == 7


def test_max_model_len_ends_by_length() -> None:
    scheduler = _scheduler(max_model_len=6)
    scheduler.add(_request("a", 4, max_tokens=None))
    assert [_step(scheduler)[1][0].finish_reason for _ in range(2)] == [None, FinishReason.LENGTH]


def test_second_request_with_the_same_prefix_shares_blocks_in_the_same_step() -> None:
    scheduler = _scheduler()
    one, two = scheduler.add(_request("a", 11)), scheduler.add(_request("b", 11))
    plan, _ = _step(scheduler)
    assert _shape(plan) == [("a", 0, 11), ("b", 8, 3)]
    assert one.block_ids[:2] == two.block_ids[:2]
    assert one.block_ids[2] != two.block_ids[2]
    assert two.num_cached_tokens == 8


def test_sibling_behind_a_chunked_prefill_shares_all_its_full_blocks() -> None:
    scheduler = _scheduler(budget=9, block_size=4)
    scheduler.add(_request("a", 30))
    scheduler.add(_request("b", 30))
    computed = Counter[str]()
    for _ in range(8):
        plan, _ = _step(scheduler)
        for chunk in plan.chunks:
            if chunk.is_prefill:
                computed[chunk.state.request.request_id] += chunk.num_tokens
    assert computed == {"a": 30, "b": 2}


def test_whole_prompt_cached_still_computes_the_last_token() -> None:
    scheduler = _scheduler()
    scheduler.add(_request("a", 8, max_tokens=1))
    _step(scheduler)
    scheduler.add(_request("b", 8))
    plan, _ = _step(scheduler)
    assert _shape(plan) == [("b", 4, 4)]


def test_waiting_for_room_does_not_count_as_a_use_of_cached_blocks() -> None:
    scheduler = _scheduler(num_blocks=6, block_size=4, max_model_len=24)
    scheduler.add(_request("old", 8, max_tokens=1))
    _step(scheduler)
    scheduler.add(_request("holder", 12, first=30))
    _step(scheduler)  # 4 of 6 blocks; the other two hold the prefix of "old"
    scheduler.add(_request("old-again", 20))
    before = [block.freed_at for block in scheduler.pool._blocks]
    _step(scheduler)
    assert [s.request.request_id for s in scheduler.waiting] == ["old-again"]
    assert [block.freed_at for block in scheduler.pool._blocks] == before


def test_no_sharing_across_salts_or_without_caching() -> None:
    scheduler = _scheduler(caching=False)
    scheduler.add(_request("a", 8))
    scheduler.add(_request("b", 8))
    assert _shape(scheduler.schedule()) == [("a", 0, 8), ("b", 0, 8)]


def test_out_of_blocks_preempts_the_newest_and_it_comes_back() -> None:
    scheduler = _scheduler(num_blocks=4, block_size=4, max_model_len=16, caching=False)
    scheduler.add(_request("old", 8))
    scheduler.add(_request("new", 7, first=30))
    _step(scheduler)  # old 9 tokens, new 8 tokens: 2 blocks each
    plan, _ = _step(scheduler)  # old needs a third block
    assert plan.num_preemptions == 1
    assert _shape(plan) == [("old", 8, 1)]
    assert [s.request.request_id for s in scheduler.waiting] == ["new"]
    ended: list[str] = []
    while scheduler.has_work:
        _, progress = _step(scheduler)
        ended += [p.key.request_id for p in progress if p.finish_reason]
    assert ended == ["old", "new"]


def test_urgent_waiting_request_takes_the_place_of_a_less_urgent_running_one() -> None:
    scheduler = _scheduler(max_num_seqs=1)
    scheduler.add(_request("low", priority=1))
    _step(scheduler)
    scheduler.add(_request("high", priority=0, first=20))
    plan, _ = _step(scheduler)
    assert plan.num_preemptions == 1
    assert _shape(plan) == [("high", 0, 4)]


def test_equal_priority_never_preempts_for_admission() -> None:
    scheduler = _scheduler(max_num_seqs=1)
    scheduler.add(_request("first"))
    _step(scheduler)
    scheduler.add(_request("second", first=20))
    plan, _ = _step(scheduler)
    assert plan.num_preemptions == 0
    assert _shape(plan) == [("first", 4, 1)]


def test_cancel_frees_blocks_at_once_and_is_reported_once() -> None:
    scheduler = _scheduler()
    scheduler.add(_request("a"))
    scheduler.add(_request("b", first=20))
    _step(scheduler)
    assert scheduler.cancel(RequestKey("a", 0))
    assert not scheduler.cancel(RequestKey("a", 0))
    scheduler.check()
    _, progress = _step(scheduler)
    assert [(p.key.request_id, p.finish_reason) for p in progress] == [("a", FinishReason.CANCELLED), ("b", None)]


def test_failed_step_fails_its_requests_and_forgets_their_promised_blocks() -> None:
    scheduler = _scheduler()
    scheduler.add(_request("a", 9))
    plan = scheduler.schedule()
    progress = scheduler.fail_step(plan, "boom")
    assert [(p.finish_reason, p.error) for p in progress] == [(FinishReason.FAILED, "boom")]
    scheduler.check()
    assert scheduler.pool.statistics().num_cached == 0


def test_row_error_fails_that_request_alone_and_forgets_its_blocks() -> None:
    scheduler = _scheduler()
    scheduler.add(_request("bad", 8))
    scheduler.add(_request("good", 8, first=20))
    progress = scheduler.update(scheduler.schedule(), [[0], [1]], {0: "nan"})
    assert [(p.key.request_id, p.finish_reason) for p in progress] == [("bad", FinishReason.FAILED), ("good", None)]
    assert scheduler.pool.statistics().num_cached == 2


def test_output_ids_of_an_earlier_attempt_count_against_max_tokens() -> None:
    scheduler = _scheduler()
    request = GenerationRequest(request_id="a", prompt_ids=(1, 2), output_ids=(3, 4), params=SamplingParams(max_tokens=3), seed=0)
    scheduler.add(request)
    plan, progress = _step(scheduler)
    assert _shape(plan) == [("a", 0, 4)]
    assert progress[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerationRequest(request_id="a", prompt_ids=(), params=SamplingParams(), seed=0), "prompt is empty"),
        (GenerationRequest(request_id="a", prompt_ids=(1,) * 60, params=SamplingParams(), seed=0), "max_model_len 60"),
        (
            GenerationRequest(request_id="a", prompt_ids=(1,), output_ids=(1,), params=SamplingParams(max_tokens=1), seed=0),
            "nothing is left",
        ),
    ],
)
def test_add_of_what_can_never_run_is_rejected(request_: GenerationRequest, message: str) -> None:
    scheduler = _scheduler()
    with pytest.raises(RequestRejected, match=message):
        scheduler.add(request_)
    assert not scheduler.has_work


def test_pool_smaller_than_one_request_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        _scheduler(num_blocks=2, block_size=4, max_model_len=60)


class SchedulerMachine(RuleBasedStateMachine):
    """Random submissions, cancels, failures and steps on a pool that is too small for them all.

    The model beside it is the KV content itself: what each block's slots really hold after each step.
    """

    BLOCK_SIZE = 4
    NUM_BLOCKS = 12
    BUDGET = 9
    MIXED_BUDGET = 6

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = _scheduler(
            num_blocks=self.NUM_BLOCKS,
            block_size=self.BLOCK_SIZE,
            max_num_seqs=4,
            budget=self.BUDGET,
            max_model_len=40,
            mixed_budget=self.MIXED_BUDGET,
        )
        self.scheduler.config = replace(self.scheduler.config, max_num_scored_tokens=5)
        self.accepted: list[RequestKey] = []
        self.endings = Counter[RequestKey]()
        self.scored = Counter[tuple[RequestKey, int]]()
        self.num_to_score: dict[RequestKey, int] = {}
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

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        before = list(self.scheduler.running)
        decoding = {state.request.key for state in before if state.is_decoding}
        plan = self.scheduler.schedule()
        prompts = [state for state in self.scheduler.running if state.request.key not in decoding]
        assert not prompts or any(chunk.state is prompts[0] for chunk in plan.chunks), "the most urgent prompt stands still"
        oldest = min(prompts, key=lambda state: state.arrival_number, default=None)
        if oldest in before and oldest is not None and oldest.num_scored >= oldest.num_to_score:
            assert any(chunk.state is oldest for chunk in plan.chunks), "the oldest prompt stands still"
        self._check_budget(plan, decoding)
        self._write(plan)
        tokens = [[data.draw(st.sampled_from([3, 4, 5, EOS]))] for chunk in plan.chunks if chunk.samples]
        self._record(self.scheduler.update(plan, tokens))

    @rule()
    def step_that_fails(self) -> None:
        self._record(self.scheduler.fail_step(self.scheduler.schedule(), "failed"))

    def _check_budget(self, plan: StepPlan, decoding: set[RequestKey]) -> None:
        assert sum(chunk.num_tokens for chunk in plan.chunks) <= self.BUDGET
        states = [chunk.state for chunk in plan.chunks if chunk.state.request.key in decoding and chunk.state.num_output_tokens]
        if states:
            priority = min(state.request.priority for state in states)
            held_back = [chunk for chunk in plan.chunks if chunk.is_prefill and chunk.state.request.priority >= priority]
            assert sum(chunk.num_tokens for chunk in held_back) <= max(self.MIXED_BUDGET - len(states), self.BLOCK_SIZE)

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
            tokens = chunk.state.token_ids
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                block = chunk.state.block_ids[position // size]
                assert self.scheduler.pool.ref_count(block) == 1 or block in plan.published, "a shared block is written"
                self.slots[block, position % size] = tuple(tokens[: position + 1])
        for chunk in plan.chunks:
            tokens = chunk.state.token_ids
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
            plan = self.scheduler.schedule()
            self._write(plan)
            self._record(self.scheduler.update(plan, [[5] for chunk in plan.chunks if chunk.samples]))
        assert set(self.endings) == set(self.accepted), "a request starved"
        assert self.scheduler.pool.num_free == self.NUM_BLOCKS


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
