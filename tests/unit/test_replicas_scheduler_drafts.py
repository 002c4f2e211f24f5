"""Several tokens a step: drafts planned, verified and taken back, hand-counted. Blocks hold four tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcache.hashing import CacheIdentity
from kvcache.prefix_cache import BlockKeyChain
from replicas.request import FinishReason, RequestKey, RequestProgress
from replicas.scheduling.scheduler import Scheduler
from replicas.scheduling.step_plan import ScheduledChunk, StepPlan
from tests.unit.scheduler_steps import EOS, drafted, new_request, new_scheduler, shape, step

A = RequestKey("a", 0)


def begun(scheduler: Scheduler, name: str = "a", num_prompt: int = 4, **settings: object) -> None:
    """A request whose prompt is computed and whose first token, 50, is known."""
    scheduler.add(new_request(name, num_prompt, **{"max_tokens": 20, **settings}))
    step(scheduler)


def verify(scheduler: Scheduler, drafts: list[int], *new_ids: int) -> tuple[ScheduledChunk, RequestProgress]:
    plan = drafted(scheduler, {"a": drafts})
    (progress,) = scheduler.update(plan, [new_ids])
    scheduler.check()
    return plan.chunks[0], progress


def is_findable(scheduler: Scheduler, *token_ids: int) -> bool:
    """Whether the block that ends this sequence is found by its key."""
    key = BlockKeyChain(CacheIdentity(), 4).key(len(token_ids) // 4 - 1, token_ids)
    return scheduler.pool.find(key, token_ids[-4:]) is not None


def test_drafts_that_are_accepted_count_as_computed_and_complete_a_block() -> None:
    scheduler = new_scheduler()
    begun(scheduler)
    plan = drafted(scheduler, {"a": [51, 52, 53]})
    (chunk,) = plan.chunks
    assert (chunk.start, chunk.num_tokens, chunk.draft_ids, chunk.logits, chunk.is_prefill) == (4, 4, (51, 52, 53), range(4, 8), False)
    assert not is_findable(scheduler, 0, 1, 2, 3, 50, 51, 52, 53), "the drafts may be wrong"
    (progress,) = scheduler.update(plan, [[51, 52, 53, 54]])
    scheduler.check()
    assert progress.token_ids == (51, 52, 53, 54)
    assert is_findable(scheduler, 0, 1, 2, 3, 50, 51, 52, 53)
    assert shape(scheduler.schedule()) == [("a", 8, 1)]


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 5, 7])
def test_drafts_behind_a_wrong_one_are_computed_anew_and_their_blocks_come_back(num_accepted: int) -> None:
    scheduler = new_scheduler()
    begun(scheduler)
    num_free = scheduler.pool.num_free
    drafts = list(range(51, 59))
    chunk, progress = verify(scheduler, drafts, *drafts[:num_accepted], 7)
    assert chunk.num_tokens == 9
    assert progress.token_ids == (*drafts[:num_accepted], 7)
    num_known = 4 + 1 + num_accepted + 1
    assert num_free - scheduler.pool.num_free == -(-num_known // 4) - 1, "blocks of known tokens alone are held"
    assert is_findable(scheduler, 0, 1, 2, 3, 50, 51, 52, 53) == (num_accepted >= 3)
    assert shape(step(scheduler)[0]) == [("a", num_known - 1, 1)]


def test_stop_token_among_the_drafts_ends_the_request_there() -> None:
    scheduler = new_scheduler()
    begun(scheduler)
    _, progress = verify(scheduler, [51, EOS, 52], 51, EOS, 52, 53)
    assert (progress.token_ids, progress.finish_reason, progress.stop_token_id) == ((51, EOS), FinishReason.STOP, EOS)
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_drafts_never_go_beyond_the_length_of_the_request() -> None:
    scheduler = new_scheduler()
    begun(scheduler, max_tokens=4)
    chunk, progress = verify(scheduler, [51, 52, 53, 54, 55], 51, 52, 53)
    assert chunk.draft_ids == (51, 52), "with the token behind them that makes four"
    assert (progress.token_ids, progress.finish_reason) == ((51, 52, 53), FinishReason.LENGTH)


def test_drafts_get_what_decodes_and_prompts_leave_of_the_budget() -> None:
    scheduler = new_scheduler(budget=12, max_num_seqs=4)
    for number, name in enumerate("abc"):
        begun(scheduler, name, first=10 * number)
    drafts = dict.fromkeys("abc", [51] * 8)
    scheduler.add(new_request("d", 20, first=60))
    plan = drafted(scheduler, drafts)
    assert shape(plan) == [("a", 6, 1), ("b", 5, 1), ("c", 4, 1), ("d", 0, 9)]
    scheduler.update(plan, [[50]] * 3)
    scheduler.check()
    scheduler.cancel(RequestKey("d", 0))
    assert shape(drafted(scheduler, drafts)) == [("a", 7, 9), ("b", 6, 2), ("c", 5, 1)]


def test_drafts_keep_to_the_budget_of_a_step_in_which_requests_decode() -> None:
    scheduler = new_scheduler(budget=32, mixed_budget=6)
    begun(scheduler)
    assert shape(drafted(scheduler, {"a": [51] * 8})) == [("a", 4, 6)]


def test_drafts_take_no_blocks_that_a_waiting_request_needs() -> None:
    scheduler = new_scheduler(num_blocks=8, max_model_len=32)
    begun(scheduler)
    for number in range(3):
        if number == 1:
            scheduler.add(new_request("b", 20, first=60))
        plan = drafted(scheduler, {"a": [51] * 20})
        scheduler.update(plan, [[50] for chunk in plan.chunks if chunk.samples])
        scheduler.check()
    assert [state.key.request_id for state in scheduler.running] == ["a", "b"]


def test_drafts_are_for_one_step_alone() -> None:
    scheduler = new_scheduler(budget=8, max_num_seqs=2)
    begun(scheduler)
    plan = drafted(scheduler, {"a": [51]})
    scheduler.update(plan, [[7]])
    assert shape(scheduler.schedule()) == [("a", 5, 1)]


def test_drafts_take_no_blocks_from_other_requests() -> None:
    scheduler = new_scheduler(num_blocks=5, max_model_len=20, max_urgent_share=0.0)
    begun(scheduler, "b", 7, first=20, priority=1)
    begun(scheduler, num_prompt=4)
    plan = drafted(scheduler, {"a": [51] * 8})
    assert plan.num_preemptions == 0
    assert [(chunk.state.key.request_id, chunk.draft_ids) for chunk in plan.chunks] == [("a", (51,) * 3), ("b", ())]
    assert scheduler.pool.num_free == 0, "the last block is for the next token of the other request"
    scheduler.update(plan, [[51, 51, 7], [50]])
    scheduler.check()


def test_blocks_reserved_for_drafts_come_back_when_there_are_none() -> None:
    scheduler = new_scheduler(num_blocks=6, max_model_len=20)
    begun(scheduler)
    plan = scheduler.schedule()
    (state,) = scheduler.running
    assert scheduler.drafts.reserve(state, 12) == 12
    assert len(state.block_ids) == 5
    assert scheduler.drafts.extend(plan, [()]) == plan
    assert len(state.block_ids) == 2
    scheduler.check()


def test_reserved_blocks_are_as_many_as_are_free() -> None:
    scheduler = new_scheduler(num_blocks=3, max_model_len=12)
    begun(scheduler)
    scheduler.schedule()
    assert scheduler.drafts.reserve(scheduler.running[0], 20) == 7, "three blocks of four slots hold five known tokens"


def test_room_for_drafts_is_in_decodes_alone_and_ends_before_the_last_token() -> None:
    scheduler = new_scheduler()
    begun(scheduler, max_tokens=4)
    begun(scheduler, "last", first=20, max_tokens=2)
    scheduler.add(new_request("prompt", 4, first=40))
    plan = scheduler.schedule()
    assert [chunk.state.key.request_id for chunk in plan.chunks] == ["a", "last", "prompt"]
    assert scheduler.drafts.rooms(plan) == [1, 0, 0], "of its four tokens the first request has two, and the step draws another"
    assert scheduler.drafts.budget(plan) == 32 - 6


def test_tokens_that_nobody_drafted_are_computed_together_in_the_next_step() -> None:
    scheduler = new_scheduler()
    begun(scheduler)
    plan = scheduler.schedule()
    (progress,) = scheduler.update(plan, [[51, 60, 61, 62]])  # forced tokens behind the drawn one
    scheduler.check()
    assert progress.token_ids == (51, 60, 61, 62)
    (chunk,) = scheduler.schedule().chunks
    assert (chunk.start, chunk.num_tokens, chunk.is_prefill, chunk.logits) == (5, 4, False, range(8, 9))


def test_step_that_fails_forgets_the_drafts_with_their_request() -> None:
    scheduler = new_scheduler()
    begun(scheduler)
    plan: StepPlan = drafted(scheduler, {"a": [51, 52, 53]})
    (progress,) = scheduler.fail_step(plan, "no device")
    scheduler.check()
    assert progress.finish_reason is FinishReason.FAILED
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_request_that_is_handed_over_with_its_next_token_gets_no_drafts() -> None:
    scheduler = new_scheduler()
    begun(scheduler, "before", 5)
    request = replace(new_request("a", 5), wants_handoff=True)
    scheduler.add(request)
    plan = drafted(scheduler, {"a": [51, 52]})
    assert [(chunk.state.key, chunk.num_tokens, chunk.is_prefill) for chunk in plan.chunks][-1] == (A, 1, False), (
        "its first block was found"
    )
    assert all(not chunk.draft_ids for chunk in plan.chunks)
