from __future__ import annotations

import pytest

from router.simulator.hardware import DEVICES, MODELS, StepTimer


def test_kv_bytes_per_token_of_llama_8b_is_128_kib() -> None:
    # 2 (K, V) x 32 layers x 8 heads x 128 dims x 2 bytes
    assert MODELS["8b"].kv_bytes_per_token == 131_072


def test_decode_of_one_token_is_bound_by_reading_the_weights() -> None:
    timer = StepTimer(MODELS["8b"], DEVICES["h100"])
    weights_s = 8.03e9 * 2 / (3.35e12 * 0.8)
    kv_s = 1_000 * 131_072 / (3.35e12 * 0.8)
    assert timer.step_s(1, 1_000, 1_000) == pytest.approx(0.004 + weights_s + kv_s)


def test_long_prefill_is_bound_by_compute() -> None:
    timer = StepTimer(MODELS["8b"], DEVICES["h100"])
    flops_per_s = 989e12 * 0.55
    num_attended = 4_096 * 4_097 / 2
    linear_s = 2 * 8.03e9 * 4_096 / flops_per_s
    attention_s = 4 * 32 * 32 * 128 * num_attended / flops_per_s
    assert timer.step_s(4_096, num_attended, 4_096) == pytest.approx(0.004 + linear_s + attention_s)


def test_devices_share_the_work() -> None:
    one, four = (StepTimer(MODELS["70b"], DEVICES["h200"], num) for num in (1, 4))
    assert one.step_s(8, 8_000, 8_000) - 0.004 == pytest.approx(4 * (four.step_s(8, 8_000, 8_000) - 0.004))
    assert four.num_blocks(16) > 4 * one.num_blocks(16)


def test_cpu_default_lies_near_what_was_measured() -> None:
    # measured on two Zen 5 cores: 2,800 to 3,000 tokens/s of prefill, 17.4 ms a step of 32 sequences, 3.9 to 6.6 ms of one
    timer = StepTimer(MODELS["135m"], DEVICES["cpu"])
    assert 1_500 / timer.step_s(1_500, 1_500 * 1_501 / 2, 1_500) == pytest.approx(2_900, rel=0.2)
    assert timer.step_s(32, 32 * 250, 32 * 250) == pytest.approx(0.0174, rel=0.2)
    assert timer.step_s(1, 250, 250) == pytest.approx(0.0066, rel=0.25)
