"""The scheduler with hand-counted steps."""

from __future__ import annotations

from collections import Counter

import pytest

from replicas.request import FinishReason, GenerationRequest, RequestKey, RequestRejected
from replicas.sampling_params import SamplingParams
from tests.unit.scheduler_steps import EOS, new_request, new_scheduler, shape, step


def test_step_mixes_decode_and_prefill_in_one_budget() -> None:
    scheduler = new_scheduler(budget=10)
    scheduler.add(new_request("a", 4))
    step(scheduler)
    scheduler.add(new_request("b", 20, first=30))
    plan, _ = step(scheduler)
    assert shape(plan) == [("a", 4, 1), ("b", 0, 9)]
    plan, _ = step(scheduler)
    assert shape(plan) == [("a", 5, 1), ("b", 9, 9)]
    plan, progress = step(scheduler)
    assert shape(plan) == [("a", 6, 1), ("b", 18, 2)]
    assert [p.key.request_id for p in progress if p.token_ids] == ["a", "b"]


def test_length_and_stop_end_a_request_once_with_the_right_reason() -> None:
    scheduler = new_scheduler()
    scheduler.add(new_request("long", max_tokens=2))
    scheduler.add(new_request("stop", first=20))
    step(scheduler, token=1)
    _, progress = step(scheduler, token=EOS)
    assert {p.key.request_id: (p.finish_reason, p.stop_token_id) for p in progress} == {
        "long": (FinishReason.STOP, EOS),
        "stop": (FinishReason.STOP, EOS),
    }
    scheduler.add(new_request("long", max_tokens=1))
    _, progress = step(scheduler, token=1)
    assert progress[0].finish_reason is FinishReason.LENGTH
    assert not scheduler.has_work


def test_ignore_eos_goes_on_but_stop_token_ids_still_end() -> None:
    scheduler = new_scheduler()
    scheduler.add(new_request("a", ignore_eos=True, stop_token_ids=(7,)))
    _, progress = step(scheduler, token=EOS)
    assert progress[0].finish_reason is None
    _, progress = step(scheduler, token=7)
    assert progress[0].stop_token_id == 7


def test_max_model_len_ends_by_length() -> None:
    scheduler = new_scheduler(max_model_len=6)
    scheduler.add(new_request("a", 4, max_tokens=None))
    assert [step(scheduler)[1][0].finish_reason for _ in range(2)] == [None, FinishReason.LENGTH]


def test_second_request_with_the_same_prefix_shares_blocks_in_the_same_step() -> None:
    scheduler = new_scheduler()
    one, two = scheduler.add(new_request("a", 11)), scheduler.add(new_request("b", 11))
    plan, _ = step(scheduler)
    assert shape(plan) == [("a", 0, 11), ("b", 8, 3)]
    assert one.block_ids[:2] == two.block_ids[:2]
    assert one.block_ids[2] != two.block_ids[2]
    assert two.num_cached_tokens == 8


def test_sibling_behind_a_chunked_prefill_shares_all_its_full_blocks() -> None:
    scheduler = new_scheduler(budget=9, block_size=4)
    scheduler.add(new_request("a", 30))
    scheduler.add(new_request("b", 30))
    computed = Counter[str]()
    for _ in range(8):
        plan, _ = step(scheduler)
        for chunk in plan.chunks:
            if chunk.is_prefill:
                computed[chunk.state.request.request_id] += chunk.num_tokens
    assert computed == {"a": 30, "b": 2}


def test_whole_prompt_cached_still_computes_the_last_token() -> None:
    scheduler = new_scheduler()
    scheduler.add(new_request("a", 8, max_tokens=1))
    step(scheduler)
    scheduler.add(new_request("b", 8))
    plan, _ = step(scheduler)
    assert shape(plan) == [("b", 4, 4)]


def test_waiting_for_room_does_not_count_as_a_use_of_cached_blocks() -> None:
    scheduler = new_scheduler(num_blocks=6, block_size=4, max_model_len=24)
    scheduler.add(new_request("old", 8, max_tokens=1))
    step(scheduler)
    scheduler.add(new_request("holder", 12, first=30))
    step(scheduler)  # 4 of 6 blocks; the other two hold the prefix of "old"
    scheduler.add(new_request("old-again", 20))
    before = [block.freed_at for block in scheduler.pool._blocks]
    step(scheduler)
    assert [s.request.request_id for s in scheduler.waiting] == ["old-again"]
    assert [block.freed_at for block in scheduler.pool._blocks] == before


def test_no_sharing_across_salts_or_without_caching() -> None:
    scheduler = new_scheduler(caching=False)
    scheduler.add(new_request("a", 8))
    scheduler.add(new_request("b", 8))
    assert shape(scheduler.schedule()) == [("a", 0, 8), ("b", 0, 8)]


def test_out_of_blocks_preempts_the_newest_and_it_comes_back() -> None:
    scheduler = new_scheduler(num_blocks=4, block_size=4, max_model_len=16, caching=False)
    scheduler.add(new_request("old", 8))
    scheduler.add(new_request("new", 7, first=30))
    step(scheduler)  # old 9 tokens, new 8 tokens: 2 blocks each
    plan, _ = step(scheduler)  # old needs a third block
    assert plan.num_preemptions == 1
    assert shape(plan) == [("old", 8, 1)]
    assert [s.request.request_id for s in scheduler.waiting] == ["new"]
    ended: list[str] = []
    while scheduler.has_work:
        _, progress = step(scheduler)
        ended += [p.key.request_id for p in progress if p.finish_reason]
    assert ended == ["old", "new"]


def test_urgent_waiting_request_takes_the_place_of_a_less_urgent_running_one() -> None:
    scheduler = new_scheduler(max_num_seqs=1)
    scheduler.add(new_request("low", priority=1))
    step(scheduler)
    scheduler.add(new_request("high", priority=0, first=20))
    plan, _ = step(scheduler)
    assert plan.num_preemptions == 1
    assert shape(plan) == [("high", 0, 4)]


def test_equal_priority_never_preempts_for_admission() -> None:
    scheduler = new_scheduler(max_num_seqs=1)
    scheduler.add(new_request("first"))
    step(scheduler)
    scheduler.add(new_request("second", first=20))
    plan, _ = step(scheduler)
    assert plan.num_preemptions == 0
    assert shape(plan) == [("first", 4, 1)]


def test_cancel_frees_blocks_at_once_and_is_reported_once() -> None:
    scheduler = new_scheduler()
    scheduler.add(new_request("a"))
    scheduler.add(new_request("b", first=20))
    step(scheduler)
    assert scheduler.cancel(RequestKey("a", 0))
    assert not scheduler.cancel(RequestKey("a", 0))
    scheduler.check()
    _, progress = step(scheduler)
    assert [(p.key.request_id, p.finish_reason) for p in progress] == [("a", FinishReason.CANCELLED), ("b", None)]


def test_failed_step_fails_its_requests_and_forgets_their_promised_blocks() -> None:
    scheduler = new_scheduler()
    scheduler.add(new_request("a", 9))
    plan = scheduler.schedule()
    progress = scheduler.fail_step(plan, "boom")
    assert [(p.finish_reason, p.error) for p in progress] == [(FinishReason.FAILED, "boom")]
    scheduler.check()
    assert scheduler.pool.statistics().num_cached == 0


def test_row_error_fails_that_request_alone_and_forgets_its_blocks() -> None:
    scheduler = new_scheduler()
    scheduler.add(new_request("bad", 8))
    scheduler.add(new_request("good", 8, first=20))
    progress = scheduler.update(scheduler.schedule(), [[0], [1]], {0: "nan"})
    assert [(p.key.request_id, p.finish_reason) for p in progress] == [("bad", FinishReason.FAILED), ("good", None)]
    assert scheduler.pool.statistics().num_cached == 2


def test_output_ids_of_an_earlier_attempt_count_against_max_tokens() -> None:
    scheduler = new_scheduler()
    request = GenerationRequest(request_id="a", prompt_ids=(1, 2), output_ids=(3, 4), params=SamplingParams(max_tokens=3), seed=0)
    scheduler.add(request)
    plan, progress = step(scheduler)
    assert shape(plan) == [("a", 0, 4)]
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
    scheduler = new_scheduler()
    with pytest.raises(RequestRejected, match=message):
        scheduler.add(request_)
    assert not scheduler.has_work


def test_pool_smaller_than_one_request_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        new_scheduler(num_blocks=2, block_size=4, max_model_len=60)
