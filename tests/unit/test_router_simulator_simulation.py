from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from router.config import PolicyName, RouterConfig
from router.policies.policy_choice import make_policy
from router.simulator.__main__ import main
from router.simulator.comparison import run_policy
from router.simulator.hardware import DEVICES, MODELS, StepTimer
from router.simulator.outcome import RequestOutcome, jain_index, percentiles, summarize
from router.simulator.simulation import Simulation, SimulationConfig, SimulationResult
from router.simulator.traces import TraceRequest, read_trace
from tests.single_request import single_request

TIMER = StepTimer(MODELS["8b"], DEVICES["h100"])
PRIOR = TIMER.prefill_tokens_per_s


def short_answers(path: Path, limit: int) -> list[TraceRequest]:
    """Prompts as they are; at most four tokens to generate, which keeps a test short."""
    return [replace(request, num_output_tokens=min(4, request.num_output_tokens)) for request in read_trace(path, 512, limit)]


def simulate(trace: list[TraceRequest], policy: PolicyName = "scoring", *, speedup: float = 1.0, **fields: object) -> SimulationResult:
    config = RouterConfig(policy=policy, prior_prefill_tokens_per_s=PRIOR, **fields)  # type: ignore[arg-type]
    return Simulation(SimulationConfig(speedup=speedup), config, make_policy(config), TIMER).run(trace)


def test_one_request_alone_takes_what_the_roofline_says() -> None:
    (outcome,) = simulate([single_request(6_758, 3)]).outcomes
    # 2,048 tokens a step: 3 full steps and the rest, 2 ms on the way; then two decode steps
    starts = [0, 2_048, 4_096, 6_144]
    sizes = [2_048, 2_048, 2_048, 6_758 - 6_144]
    prefill_s = sum(TIMER.step_s(size, size * (start + (size + 1) / 2), start + size) for start, size in zip(starts, sizes, strict=True))
    assert outcome.ttft_s == pytest.approx(0.002 + prefill_s)
    decode_s = TIMER.step_s(1, 6_759, 6_759) + TIMER.step_s(1, 6_760, 6_760)
    assert outcome.tpot_s == pytest.approx(decode_s / 2)
    assert outcome.is_good


def test_same_seed_gives_the_same_outcomes(synthetic_trace: Path) -> None:
    trace = short_answers(synthetic_trace, 60)
    runs = [[asdict(outcome) for outcome in simulate(trace, speedup=4.0).outcomes] for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("policy", ["scoring", "least_loaded", "round_robin", "power_of_two", "longest_prefix", "consistent_hash"])
def test_every_request_ends_and_every_block_comes_back(policy: PolicyName, synthetic_trace: Path) -> None:
    trace = short_answers(synthetic_trace, 30)
    result = simulate(trace, policy, speedup=10.0)
    assert all(outcome.end_s is not None for outcome in result.outcomes)
    for replica in result.replicas:
        replica.scheduler.check()
        assert replica.pool.num_free == replica.pool.num_blocks
        assert not replica.scheduler.has_work


@pytest.mark.parametrize("policy", ["scoring", "longest_prefix"])
def test_block_that_every_conversation_shares_does_not_collapse_on_one_replica(policy: PolicyName, conversation_trace: Path) -> None:
    trace = short_answers(conversation_trace, 300)
    figures = run_policy(policy, trace, SimulationConfig(), TIMER, RouterConfig(prior_prefill_tokens_per_s=PRIOR))
    busiest = figures["busiest_to_mean_work"]
    assert isinstance(busiest, float)
    assert busiest < 1.3


def test_overload_with_a_wait_limit_sheds_and_serves_the_rest(synthetic_trace: Path) -> None:
    trace = short_answers(synthetic_trace, 120)
    result = simulate(trace, speedup=40.0, max_wait_s=2.0)
    rejected = [outcome for outcome in result.outcomes if outcome.is_rejected]
    assert 0 < len(rejected) < 120
    assert all(outcome.retry_after_s is not None and outcome.retry_after_s >= 1 for outcome in rejected)
    assert all(outcome.end_s is not None for outcome in result.outcomes if not outcome.is_rejected)


def test_high_tier_waits_at_most_a_dispatch_slot_behind_a_flood(conversation_trace: Path, synthetic_trace: Path) -> None:
    rows = [replace(request, num_output_tokens=2, arrival_s=0.0, priority=5) for request in read_trace(synthetic_trace, 512, 80)]
    urgent = [
        replace(request, request_id=f"urgent {number}", arrival_s=1.0 + number, priority=0, num_output_tokens=2)
        for number, request in enumerate(read_trace(conversation_trace, 512, 6))
    ]
    result = simulate([*rows, *urgent])
    # a dispatch slot's time: the longest prompt that may be in front, at the rate that the replica reaches on it
    slot_s = max(request.num_prompt_tokens for request in rows) / PRIOR * 1.5
    waits = [
        outcome.dispatch_s - outcome.arrival_s for outcome in result.outcomes if outcome.priority == 0 and outcome.dispatch_s is not None
    ]
    assert len(waits) == 6
    assert max(waits) <= slot_s


def urgent_ttfts_s(num_less_urgent: int, max_urgent_share: float) -> tuple[list[float], SimulationResult]:
    """TTFT of five urgent prompts that come at 3 s, when less urgent requests have decoded in all 16 slots for a while. A step takes 3 ms
    a token, and a millisecond."""
    timer = StepTimer(MODELS["135m"], replace(DEVICES["cpu"], flops_per_s=100e9, bytes_per_s=1e12))
    config = SimulationConfig(
        num_replicas=1, num_blocks=2_000, block_size=4, max_num_seqs=16, max_num_batched_tokens=32, max_num_mixed_tokens=6,
        max_urgent_share=max_urgent_share,
    )  # fmt: skip
    router_config = RouterConfig(prior_prefill_tokens_per_s=timer.prefill_tokens_per_s)
    short = replace(single_request(16, 60), block_keys=())
    trace = [replace(short, request_id=f"q{number}", runs=(number,), priority=5) for number in range(num_less_urgent)]
    trace += [
        replace(short, request_id=f"u{number}", runs=(100 + number,), arrival_s=3.0, num_prompt_tokens=43, num_output_tokens=8)
        for number in range(5)
    ]
    result = Simulation(config, router_config, make_policy(router_config), timer).run(trace)
    ttfts_s = [outcome.ttft_s for outcome in result.outcomes if outcome.priority == 0]
    return [ttft_s for ttft_s in ttfts_s if ttft_s is not None], result


def test_urgent_prompts_beside_a_backlog_take_little_longer_than_on_an_idle_replica() -> None:
    idle_s, _ = urgent_ttfts_s(0, 0.8)
    beside_s, result = urgent_ttfts_s(30, 0.8)
    before_s, before = urgent_ttfts_s(30, 0.0)
    assert max(beside_s) < 1.5 * max(idle_s)
    assert max(before_s) > 1.8 * max(idle_s)
    for outcome in result.outcomes[30:]:
        assert outcome.predicted_ttft_s == pytest.approx(outcome.ttft_s, rel=0.2), "the router knows who steps aside"
    # the others lose no more than the urgent work, which both runs have
    ends = [[outcome.end_s or 0.0 for outcome in run.outcomes if outcome.priority] for run in (result, before)]
    assert len(ends[0]) == 30
    assert max(ends[0]) < 1.02 * max(ends[1])


def test_summary_of_known_outcomes() -> None:
    def outcome(name: str, replica_id: str, ttft_s: float, cached: int) -> RequestOutcome:
        return RequestOutcome(
            request_id=name,
            tenant=name,
            priority=0,
            arrival_s=10.0,
            num_prompt_tokens=100,
            num_output_tokens=11,
            ttft_limit_s=2.0,
            tpot_limit_s=0.1,
            replica_id=replica_id,
            dispatch_s=10.0,
            first_token_s=10.0 + ttft_s,
            end_s=10.0 + ttft_s + 0.5,
            num_cached_tokens=cached,
        )

    summary = summarize([outcome("a", "r0", 1.0, 0), outcome("b", "r1", 3.0, 50)], num_replicas=4, end_s=20.0)
    assert summary["hit_rate"] == pytest.approx(50 / 200)
    assert summary["busiest_to_mean_work"] == pytest.approx(100 / (150 / 4))
    assert summary["goodput_share"] == pytest.approx(0.5)
    assert summary["goodput_per_s"] == pytest.approx(1 / 10)
    # service: 100 + 2 x 11 and 50 + 2 x 11
    assert summary["tenant_fairness"] == pytest.approx((122 + 72) ** 2 / (2 * (122**2 + 72**2)))


def test_percentiles_use_the_nearest_rank() -> None:
    assert percentiles([float(value) for value in range(1, 101)]) == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert percentiles([]) == {}


def test_jain_index_of_one_taking_all_is_one_over_n() -> None:
    assert jain_index([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([3.0, 3.0]) == pytest.approx(1.0)


def test_command_line_writes_figures_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str], synthetic_trace: Path) -> None:
    figures, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["--trace", str(synthetic_trace), "--limit", "6", "--blocks-per-replica", "5000", "--tenants", "2"]
    assert main([*arguments, "--compare", "--json", str(figures), "--picture", str(picture)]) == 0
    report = json.loads(figures.read_text())
    assert report["runs"][0]["policy"] == "scoring"
    assert len(report["runs"]) == 6
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "hit rate" in capsys.readouterr().out


def test_command_line_bad_value_is_one_line_and_status_2(caplog: pytest.LogCaptureFixture, synthetic_trace: Path) -> None:
    assert main(["--trace", "nowhere.txt"]) == 2
    assert main(["--trace", str(synthetic_trace), "--speedup", "0"]) == 2
    assert "--speedup must be above 0" in caplog.text
