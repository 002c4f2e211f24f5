from __future__ import annotations

import pytest

from replicas.engine.step_statistics import StepStatistics
from replicas.request import RequestKey, RequestProgress, StepOutput
from replicas.stats import SMOOTHING


def _rate_after(*steps: StepOutput) -> float | None:
    statistics = StepStatistics()
    for step in steps:
        statistics.add(step)
    return statistics.snapshot().prefill_tokens_per_s


ALONE = StepOutput(num_prefill_tokens=400, cuts_a_prompt=True, step_s=0.25)  # 1,600 a second


def test_prefill_rate_is_that_of_the_first_step_and_then_smoothed() -> None:
    assert _rate_after() is None
    assert _rate_after(ALONE) == pytest.approx(1600.0)
    slower = StepOutput(num_prefill_tokens=396, num_decode_tokens=4, step_s=0.5)  # 800 a second, its few decodes counted
    assert _rate_after(ALONE, slower) == pytest.approx(1600.0 + SMOOTHING * (800.0 - 1600.0))


def test_prefill_rate_falls_to_what_decodes_leave_of_steps_that_cut_prompts() -> None:
    held_back = StepOutput(num_prefill_tokens=16, num_decode_tokens=32, cuts_a_prompt=True, step_s=0.05)  # 320 a second
    assert _rate_after(held_back) == pytest.approx(320.0)
    assert _rate_after(ALONE, *[held_back] * 60) == pytest.approx(320.0, rel=0.01)
    assert _rate_after(ALONE, *[held_back] * 60, *[ALONE] * 60) == pytest.approx(1600.0, rel=0.01)


def test_urgent_rate_is_that_of_prompts_alone_less_the_share_of_those_that_step_aside() -> None:
    statistics = StepStatistics(max_urgent_share=0.75)
    assert statistics.snapshot().urgent_tokens_per_s is None
    statistics.add(StepOutput(num_prefill_tokens=16, num_decode_tokens=32, cuts_a_prompt=True, step_s=0.05))
    assert statistics.snapshot().urgent_tokens_per_s is None
    statistics.add(StepOutput(num_prefill_tokens=400, num_paused=32, cuts_a_prompt=True, step_s=0.25))
    found = statistics.snapshot()
    assert found.urgent_tokens_per_s == pytest.approx(0.75 * 1600.0)
    assert found.prefill_tokens_per_s == pytest.approx(320.0), "what a request sees that is not more urgent"
    assert found.num_pauses == 32


def test_urgent_rate_is_unknown_where_nobody_steps_aside() -> None:
    statistics = StepStatistics()
    statistics.add(ALONE)
    assert statistics.snapshot().urgent_tokens_per_s is None


def test_short_prompt_beside_many_decodes_says_nothing_of_the_prefill_rate() -> None:
    whole = StepOutput(num_prefill_tokens=16, num_decode_tokens=32, step_s=0.05)
    assert _rate_after(whole) is None
    assert _rate_after(ALONE, whole) == pytest.approx(1600.0)


def test_decode_seconds_are_those_of_a_token_when_drafts_give_several() -> None:
    def tokens(*nums: int) -> tuple[RequestProgress, ...]:
        return tuple(RequestProgress(key=RequestKey(f"r{i}", 0), attempt=0, token_ids=(7,) * num) for i, num in enumerate(nums))

    statistics = StepStatistics()
    statistics.add(StepOutput(progress=tokens(1, 1), num_decode_tokens=2, step_s=0.01))
    assert statistics.snapshot().decode_step_s == pytest.approx(0.01)
    statistics.add(StepOutput(progress=tokens(4, 2), num_decode_tokens=10, num_drafts=8, step_s=0.015))  # 0.005 for each of two tokens
    assert statistics.snapshot().decode_step_s == pytest.approx(0.01 + SMOOTHING * (0.005 - 0.01))
