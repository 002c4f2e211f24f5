"""How prompts share a step with decodes and with each other, hand-counted through the scheduler."""

from __future__ import annotations

from replicas.request import RequestKey
from tests.unit.scheduler_steps import new_request, new_scheduler, shape, step


def test_step_in_which_requests_decode_takes_fewer_tokens_of_prompts() -> None:
    scheduler = new_scheduler(budget=32, mixed_budget=10)
    scheduler.add(new_request("a", 20))
    assert shape(step(scheduler)[0]) == [("a", 0, 20)], "nobody decodes yet"
    scheduler.add(new_request("b", 30, first=30))
    assert shape(step(scheduler)[0]) == [("a", 20, 1), ("b", 0, 9)]
    scheduler.cancel(RequestKey("a", 0))
    assert shape(step(scheduler)[0]) == [("b", 9, 21)], "nobody decodes any more"


def test_prompt_goes_on_by_a_block_beside_more_decodes_than_the_mixed_budget() -> None:
    scheduler = new_scheduler(block_size=4, mixed_budget=2)
    for name in "abc":
        scheduler.add(new_request(name, 4))
    step(scheduler)
    scheduler.add(new_request("d", 20, first=30))
    for start in (0, 4, 8):
        assert shape(step(scheduler)[0])[3:] == [("d", start, 4)]


def test_prompt_more_urgent_than_all_decodes_is_not_held_back() -> None:
    scheduler = new_scheduler(budget=32, mixed_budget=10)
    scheduler.add(new_request("batch", 4, priority=2))
    step(scheduler)
    scheduler.add(new_request("same", 20, first=30, priority=2))
    scheduler.add(new_request("urgent", 20, first=60, priority=1))
    assert shape(step(scheduler)[0]) == [("batch", 4, 1), ("urgent", 0, 20), ("same", 0, 9)], "what is left of both budgets"
    scheduler.add(new_request("later", 20, first=90, priority=1))
    assert shape(step(scheduler)[0]) == [("urgent", 20, 1), ("batch", 5, 1), ("later", 0, 6), ("same", 9, 2)], "an equal one decodes"


def test_oldest_prompt_goes_on_beside_a_flood_of_more_urgent_ones() -> None:
    scheduler = new_scheduler(budget=32)
    scheduler.add(new_request("old", 50, first=900, priority=1))
    assert shape(step(scheduler)[0]) == [("old", 0, 32)]
    for number in range(4):
        scheduler.add(new_request(f"urgent {number}", 50, first=100 * number, max_tokens=1))
    steps = [shape(step(scheduler)[0]) for _ in range(3)]
    assert steps == [
        [("urgent 0", 0, 28), ("old", 32, 4)],
        [("urgent 0", 28, 22), ("urgent 1", 0, 6), ("old", 36, 4)],
        [("urgent 1", 6, 28), ("old", 40, 4)],
    ]


def test_last_token_of_a_prompt_holds_no_other_prompt_back() -> None:
    scheduler = new_scheduler(budget=8, mixed_budget=1)
    scheduler.add(new_request("a", 9))
    step(scheduler)
    scheduler.add(new_request("b", 20, first=30))
    assert shape(step(scheduler)[0]) == [("a", 8, 1), ("b", 0, 7)]


def test_request_that_computes_nothing_gets_its_blocks_beside_a_full_mixed_step() -> None:
    scheduler = new_scheduler(budget=32, mixed_budget=5)
    scheduler.add(new_request("a", 4))
    step(scheduler)
    scheduler.add(new_request("b", 40, first=30))
    scheduler.add(new_request("pulled", 20, first=80))
    scheduler.expect_load(RequestKey("pulled", 0))
    assert shape(step(scheduler)[0]) == [("a", 4, 1), ("b", 0, 4)]
    assert [state.request.request_id for state in scheduler.take_loads()] == ["pulled"]
