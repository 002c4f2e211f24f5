"""Decodes step aside while a more urgent prompt is computed, for a bounded share of the work and a bounded time."""

from __future__ import annotations

import pytest

from replicas.scheduling.scheduler import Scheduler
from replicas.scheduling.step_plan import StepPlan
from tests.unit.scheduler_steps import new_request, new_scheduler, shape, step

LESS_URGENT = 10


def decoding(num: int, **config: object) -> Scheduler:
    """A scheduler in which `num` less urgent requests, named a, b, ..., decode; up to six of them at their fifth token."""
    scheduler = new_scheduler(**{"budget": 24, "num_blocks": 400, "max_num_seqs": 12, "max_model_len": 1_000, **config})  # type: ignore[arg-type]
    for number in range(num):
        scheduler.add(new_request("abcdefgh"[number], first=100 * number, priority=LESS_URGENT, max_tokens=40))
    while not all(state.is_decoding for state in scheduler.running) or scheduler.waiting:
        step(scheduler)
    return scheduler


def names(plan: StepPlan) -> list[str]:
    return [chunk.state.request.request_id for chunk in plan.chunks]


def test_urgent_prompt_is_computed_without_the_less_urgent_decodes() -> None:
    scheduler = decoding(4)
    scheduler.add(new_request("urgent", num_prompt=40, first=1_000))
    blocks = {state.key: list(state.block_ids) for state in scheduler.running}
    first, _ = step(scheduler)
    assert shape(first) == [("urgent", 0, 24)]
    assert first.num_paused == 4
    assert {state.key: state.block_ids for state in scheduler.running if state.key in blocks} == blocks
    second, _ = step(scheduler)  # 4 decodes allow 4 x 4 tokens of urgent work in a row, and it got 24: it is their turn
    assert shape(second) == [("a", 4, 1), ("b", 4, 1), ("c", 4, 1), ("d", 4, 1), ("urgent", 24, 16)]
    assert second.num_paused == 0
    third, _ = step(scheduler)
    assert names(third) == ["urgent", "a", "b", "c", "d"]


def test_pause_ends_when_the_prompt_has_its_first_token() -> None:
    scheduler = decoding(4)
    scheduler.add(new_request("urgent", num_prompt=10, first=1_000))
    plan, progress = step(scheduler)
    assert names(plan) == ["urgent"]
    assert [item.key.request_id for item in progress if item.token_ids] == ["urgent"]
    assert names(step(scheduler)[0]) == ["urgent", "a", "b", "c", "d"]


@pytest.mark.parametrize("priority", [LESS_URGENT, LESS_URGENT + 1])
def test_prompt_of_equal_or_less_urgent_priority_pauses_nobody(priority: int) -> None:
    scheduler = decoding(4)
    scheduler.add(new_request("later", num_prompt=40, first=1_000, priority=priority))
    plan, _ = step(scheduler)
    assert shape(plan)[:4] == [("a", 4, 1), ("b", 4, 1), ("c", 4, 1), ("d", 4, 1)]
    assert plan.num_paused == 0


def test_share_of_zero_pauses_nobody() -> None:
    scheduler = decoding(4, max_urgent_share=0.0)
    scheduler.add(new_request("urgent", num_prompt=40, first=1_000))
    assert shape(step(scheduler)[0])[:2] == [("a", 4, 1), ("b", 4, 1)]


def test_more_urgent_decode_goes_on_beside_the_prompt() -> None:
    scheduler = decoding(4)
    scheduler.add(new_request("first", num_prompt=4, first=1_000, max_tokens=40))
    step(scheduler)
    scheduler.add(new_request("second", num_prompt=40, first=2_000))
    assert shape(step(scheduler)[0]) == [("first", 4, 1), ("second", 0, 23)]


def test_flood_of_urgent_prompts_leaves_the_decodes_their_share_of_the_work() -> None:
    """Share 0.8: four urgent tokens for each token of a decode. Steps have 24 tokens, and 7 decodes allow 28: two steps, then theirs."""
    scheduler = decoding(7)
    gaps = []
    num_tokens = 0
    for number in range(40):
        while len(scheduler.running) + len(scheduler.waiting) < 9:
            first = 1_000 * (number + 1) + 100 * len(scheduler.waiting)
            scheduler.add(new_request(f"u{first}", num_prompt=50, first=first, max_tokens=1))
        plan, _ = step(scheduler)
        if "a" in names(plan):
            assert names(plan)[:7] == list("abcdefg")
            gaps.append(num_tokens)
            num_tokens = 0
        else:
            num_tokens += plan.num_tokens
    assert len(gaps) == 13
    assert set(gaps) == {48}


def test_longest_pause_ends_by_the_clock_however_little_was_computed() -> None:
    scheduler = decoding(7, max_urgent_share=0.99, max_urgent_pause_s=1.0)
    paused_at = []
    for number in range(30):
        now_s = number / 10
        scheduler.add(new_request(f"u{number}", num_prompt=2, first=1_000 * (number + 1), max_tokens=1))
        plan, _ = step(scheduler, now_s=now_s)
        if plan.num_paused == 0:
            paused_at.append(now_s)
    assert paused_at == [1.0, 2.1], "the pause begins at 0.0, and again with the step after the token"


def test_few_decodes_beside_a_long_prompt_go_on() -> None:
    """Without the 2 decodes a step would compute 24 tokens of the prompt instead of 22."""
    scheduler = decoding(2)
    scheduler.add(new_request("urgent", num_prompt=300, first=1_000))
    assert shape(step(scheduler)[0]) == [("a", 4, 1), ("b", 4, 1), ("urgent", 0, 22)]


def test_held_back_prompt_counts_with_the_tokens_that_it_may_have() -> None:
    """An urgent stream holds the next urgent prompt back to a block of 4 tokens; beside those the same 2 decodes are many."""
    scheduler = decoding(2, mixed_budget=4)
    scheduler.add(new_request("first", num_prompt=4, first=1_000, max_tokens=40))
    step(scheduler)
    scheduler.add(new_request("second", num_prompt=300, first=2_000))
    assert shape(step(scheduler)[0]) == [("first", 4, 1), ("second", 0, 4)]


def test_prompts_as_urgent_as_the_paused_decodes_get_one_block_together() -> None:
    scheduler = decoding(4)
    for name in ("later", "last"):
        scheduler.add(new_request(name, num_prompt=20, first=1_000 if name == "later" else 2_000, priority=LESS_URGENT))
    scheduler.add(new_request("urgent", num_prompt=6, first=3_000))
    assert shape(step(scheduler)[0]) == [("urgent", 0, 6), ("later", 0, 4)]


def test_urgent_request_at_max_num_seqs_takes_the_slot_of_one_and_the_others_pause() -> None:
    scheduler = decoding(4, max_num_seqs=4)
    scheduler.add(new_request("urgent", num_prompt=20, first=1_000, max_tokens=1))
    plan, _ = step(scheduler)
    assert names(plan) == ["urgent"]
    assert (plan.num_preemptions, plan.num_paused) == (1, 3)
    plan, _ = step(scheduler)
    assert shape(plan) == [("a", 4, 1), ("b", 4, 1), ("c", 4, 1), ("d", 4, 1)], "the victim's full block was found in the cache"
    for _ in range(40):
        step(scheduler)
    assert not scheduler.has_work


def test_paused_decodes_give_the_tokens_that_they_would_have_given() -> None:
    """Which tokens a request computes does not depend on when: every position once, in order."""
    computed: dict[str, list[int]] = {}
    scheduler = decoding(4)
    for number in range(40):
        if number % 3 == 0:
            scheduler.add(new_request(f"u{number}", num_prompt=20, first=1_000 * (number + 1), max_tokens=2))
        plan, _ = step(scheduler)
        for chunk in plan.chunks:
            computed.setdefault(chunk.state.request.request_id, []).extend(range(chunk.start, chunk.start + chunk.num_tokens))
    while scheduler.has_work:
        plan, _ = step(scheduler)
        for chunk in plan.chunks:
            computed.setdefault(chunk.state.request.request_id, []).extend(range(chunk.start, chunk.start + chunk.num_tokens))
    for name in "abcd":
        assert computed[name] == list(range(4, 43)), "40 tokens: the last one is never computed"
