"""A simulated replica's reports, worked out by hand from its roofline."""

from __future__ import annotations

import pytest

from replicas.request import GenerationRequest
from replicas.sampling_params import SamplingParams
from replicas.scheduling.scheduler_config import SchedulerConfig
from router.simulator.hardware import DEVICES, MODELS, StepTimer
from router.simulator.replica import SimulatedReplica

TIMER = StepTimer(MODELS["8b"], DEVICES["h100"])


@pytest.fixture
def replica() -> SimulatedReplica:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=1_024, max_model_len=4_096)
    return SimulatedReplica("r", "m", TIMER, config, num_blocks=8, block_size=512)


def request(name: str, num_tokens: int, num_outputs: int) -> GenerationRequest:
    params = SamplingParams(max_tokens=num_outputs, ignore_eos=True)
    return GenerationRequest(request_id=name, prompt_ids=(len(name),) * num_tokens, params=params, seed=0)


def step(replica: SimulatedReplica) -> float:
    step_s = replica.begin_step()
    assert step_s is not None
    replica.finish_step()
    return step_s


def test_rates_of_a_report_are_those_of_its_steps(replica: SimulatedReplica) -> None:
    replica.add(request("a", 600, 3))
    prefill_s = TIMER.step_s(600, 600 * 601 / 2, 600)
    assert step(replica) == pytest.approx(prefill_s)
    stats = replica.report().stats
    assert stats.prefill_tokens_per_s == pytest.approx(600 / prefill_s)
    assert stats.decode_step_s is None
    first_s, second_s = TIMER.step_s(1, 601, 601), TIMER.step_s(1, 602, 602)
    assert [step(replica), step(replica)] == pytest.approx([first_s, second_s])
    # a new value counts a fifth, as in an engine's reports
    assert replica.report().stats.decode_step_s == pytest.approx(0.8 * first_s + 0.2 * second_s)
    assert replica.begin_step() is None


def test_counters_of_a_report_count_requests_and_tokens(replica: SimulatedReplica) -> None:
    replica.add(request("a", 600, 2))
    replica.add(request("bb", 1_000, 1))
    stats = replica.report().stats
    assert (stats.num_waiting, stats.num_running, stats.num_uncomputed_tokens) == (2, 0, 1_600)
    step(replica)
    stats = replica.report().stats
    assert (stats.num_waiting, stats.num_running, stats.num_uncomputed_tokens, stats.num_context_tokens) == (0, 2, 576, 1_024)
    step(replica)
    stats = replica.report().stats
    assert (stats.num_steps, stats.num_prompt_tokens, stats.num_generated_tokens, stats.num_finished) == (2, 1_600, 3, 2)
    assert (stats.num_free_blocks, stats.num_blocks) == (8, 8)


def test_transfer_rate_of_a_report_counts_only_what_moved(replica: SimulatedReplica) -> None:
    asked = request("a", 600, 2)
    replica.add_handoff(asked)
    assert replica.begin_step() is None, "its KV is on the way"
    assert replica.take_loads() == [(asked.key, 0)]
    replica.note_arrived(asked.key, 600, num_moved=600, moving_s=0.5)
    assert replica.report().stats.transfer_tokens_per_s == pytest.approx(1_200)
    replica.note_arrived(asked.key, 600, num_moved=0, moving_s=0.0)
    assert replica.report().stats.transfer_tokens_per_s == pytest.approx(1_200)
