"""Pools in the simulator: times worked out by hand, and every block back."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from router.config import PolicyName, RouterConfig
from router.policies.policy_choice import make_policy
from router.simulator.__main__ import main
from router.simulator.hardware import DEVICES, MODELS, StepTimer
from router.simulator.simulation import Simulation, SimulationConfig, SimulationResult
from router.simulator.traces import TraceRequest, read_trace
from tests.single_request import single_request

TIMER = StepTimer(MODELS["8b"], DEVICES["h100"])
KV_BYTES = MODELS["8b"].kv_bytes_per_token


def simulate(
    trace: list[TraceRequest], num_prefill: int, num_decode: int, policy: PolicyName = "round_robin", **fields: object
) -> SimulationResult:
    """Round robin always makes a pair."""
    router_config = RouterConfig(policy=policy, prior_prefill_tokens_per_s=TIMER.prefill_tokens_per_s, dispatch_ahead=None)
    config = SimulationConfig(num_replicas=num_prefill + num_decode, num_prefill_replicas=num_prefill, **fields)  # type: ignore[arg-type]
    return Simulation(config, router_config, make_policy(router_config), TIMER).run(trace)


def one_request(num_output_tokens: int) -> TraceRequest:
    """6,758 tokens: three full chunks of 2,048 and one of 614."""
    return single_request(6_758, num_output_tokens)


def chunk_s(start: int, size: int) -> float:
    return TIMER.step_s(size, size * (start + (size + 1) / 2), start + size)


PREFILL_S = chunk_s(0, 2_048) + chunk_s(2_048, 2_048) + chunk_s(4_096, 2_048) + chunk_s(6_144, 614)
DECODE_S = TIMER.step_s(1, 6_759, 6_759) + TIMER.step_s(1, 6_760, 6_760)


def test_transfer_hides_behind_the_prefill_but_for_the_last_chunk() -> None:
    (outcome,) = simulate([one_request(3)], 1, 1, transfer_bytes_per_s=KV_BYTES * 1e5).outcomes
    assert outcome.ttft_s == pytest.approx(0.002 + PREFILL_S), "the first token comes from the prefill replica"
    assert outcome.tpot_s == pytest.approx((614 / 1e5 + DECODE_S) / 2)
    assert (outcome.prefill_replica_id, outcome.replica_id) == ("r0", "r1")


def test_slow_transfer_begins_with_the_first_chunk_and_holds_the_second_token_up() -> None:
    result = simulate([one_request(3)], 1, 1, transfer_bytes_per_s=KV_BYTES * 1e4)
    (outcome,) = result.outcomes
    # it starts 2 ms after the first chunk, when the decode replica has heard of it
    assert outcome.tpot_s == pytest.approx((chunk_s(0, 2_048) + 0.002 + 6_758 / 1e4 - PREFILL_S + DECODE_S) / 2)
    assert (result.num_moved_tokens, result.moving_s) == (6_758, pytest.approx(0.6758))


def test_handoffs_of_one_pair_share_its_link() -> None:
    first = one_request(2)
    second = replace(first, request_id="second", runs=(7,), block_keys=(), num_prompt_tokens=512)
    slow = {"transfer_bytes_per_s": KV_BYTES * 1e3}
    last = simulate([first, second], 1, 1, **slow).outcomes[1]
    alone = simulate([second], 1, 1, **slow).outcomes[0]
    assert last.tpot_s is not None
    assert alone.tpot_s == pytest.approx(0.512 + TIMER.step_s(1, 513, 513), rel=0.01)
    assert last.tpot_s > 2.0, "it comes after the rest of a transfer of 6.8 s"


def test_blocks_that_the_decode_replica_holds_do_not_move() -> None:
    first = one_request(2)
    again = replace(first, request_id="again", arrival_s=5.0)
    result = simulate([first, again], 1, 1)
    # 13 full blocks of 512 are cached on both sides
    assert result.num_moved_tokens == 6_758 + 6_758 - 13 * 512
    assert result.outcomes[1].num_cached_tokens == 13 * 512


def test_request_that_ends_with_its_first_token_is_not_decoded() -> None:
    result = simulate([one_request(1)], 1, 1)
    (outcome,) = result.outcomes
    assert outcome.end_s == outcome.first_token_s == pytest.approx(0.002 + PREFILL_S)
    check(result)


def check(result: SimulationResult) -> None:
    assert all(outcome.end_s is not None for outcome in result.outcomes)
    for replica in result.replicas:
        replica.scheduler.check()
        assert replica.pool.num_free == replica.pool.num_blocks


@pytest.mark.parametrize("policy", ["scoring", "round_robin", "longest_prefix"])
def test_every_request_ends_and_every_block_comes_back_on_both_sides(policy: PolicyName, synthetic_trace: Path) -> None:
    trace = [replace(request, num_output_tokens=min(8, request.num_output_tokens)) for request in read_trace(synthetic_trace, 512, 60)]
    runs = [simulate(trace, 2, 2, policy, speedup=8.0, num_blocks=800) for _ in range(2)]
    check(runs[0])
    assert [asdict(outcome) for outcome in runs[0].outcomes] == [asdict(outcome) for outcome in runs[1].outcomes]
    assert runs[0].plans["pair"] > 0
    assert runs[0].plans.total() == 60


def test_decode_steps_are_not_held_up_by_long_prompts_of_others(synthetic_trace: Path) -> None:
    trace = [replace(request, num_output_tokens=min(60, request.num_output_tokens)) for request in read_trace(synthetic_trace, 512, 60)]
    worst = {}
    for num_prefill in (0, 2):
        outcomes = simulate(trace, num_prefill, 4 - num_prefill, speedup=4.0, max_num_batched_tokens=8_192).outcomes
        worst[num_prefill] = sorted(outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None)[-6]
    assert worst[2] < worst[0] / 2


def test_small_budget_of_mixed_steps_keeps_decode_steps_short_without_pools(synthetic_trace: Path) -> None:
    trace = [replace(request, num_output_tokens=min(60, request.num_output_tokens)) for request in read_trace(synthetic_trace, 512, 60)]
    worst = {}
    for num_tokens in (None, 512):
        outcomes = simulate(trace, 0, 4, speedup=4.0, max_num_batched_tokens=8_192, max_num_mixed_tokens=num_tokens).outcomes
        worst[num_tokens] = sorted(outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None)[-6]
    assert worst[512] < worst[None] / 2


def test_command_line_takes_pools(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, synthetic_trace: Path) -> None:
    arguments = ["--trace", str(synthetic_trace), "--limit", "6", "--mode", "disaggregated", "--prefill", "1", "--decode", "1"]
    assert main([*arguments, "--bandwidth", "1e10"]) == 0
    assert "scoring" in capsys.readouterr().out
    assert main([*arguments, "--bandwidth", "0"]) == 2
    assert "--bandwidth must be above 0" in caplog.text
