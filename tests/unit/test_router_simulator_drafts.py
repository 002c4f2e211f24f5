"""A simulated replica that drafts: tokens and seconds by hand, and the controller's choice from the device's costs."""

from __future__ import annotations

import pytest

from replicas.request import GenerationRequest
from replicas.sampling_params import SamplingParams
from replicas.scheduling.scheduler_config import SchedulerConfig
from router.simulator.drafts import SimulatedDrafts
from router.simulator.hardware import DEVICES, MODELS, StepTimer
from router.simulator.replica import SimulatedReplica
from router.simulator.simulation import SimulationConfig
from tests.speculation_states import new_state

H100 = StepTimer(MODELS["8b"], DEVICES["h100"])


def generated(acceptance: tuple[float, ...], timer: StepTimer = H100, num_requests: int = 1) -> tuple[SimulatedReplica, list[float]]:
    """A replica that generated 101 tokens for each request, and the seconds of its steps after the prompts."""
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=1_024, max_model_len=4_096)
    replica = SimulatedReplica("r", "m", timer, config, num_blocks=640, block_size=16, draft_acceptance=acceptance, max_drafts=4)
    params = SamplingParams(max_tokens=101, ignore_eos=True)
    for number in range(num_requests):
        replica.add(GenerationRequest(request_id=f"r{number}", prompt_ids=(number,) * 8, params=params, seed=0))
    seconds: list[float] = []
    while (step_s := replica.begin_step()) is not None:
        replica.finish_step()
        seconds.append(step_s)
    assert replica.stats().num_generated_tokens == 101 * num_requests
    replica.scheduler.check()
    return replica, seconds[1:]


def test_replica_without_chances_makes_a_token_a_step() -> None:
    replica, seconds = generated(())
    assert len(seconds) == 100
    assert replica.stats().drafts == ()


def test_drafts_that_are_always_right_give_five_tokens_a_step_of_five_rows() -> None:
    replica, seconds = generated((1.0,))
    assert len(seconds) == 20
    num_attended = sum(9 + place for place in range(5))
    assert seconds[0] == pytest.approx(H100.step_s(5, num_attended, 13))
    (drafts,) = replica.stats().drafts
    assert (drafts.num_passes, drafts.num_drafted, drafts.num_accepted) == (20, 80, 80)
    assert replica.stats().decode_step_s == pytest.approx(seconds[-1] / 5, rel=0.01)


def test_drafts_that_are_never_right_cost_little_and_are_given_up() -> None:
    slow = StepTimer(MODELS["135m"], DEVICES["cpu"])
    _, seconds = generated((0.0,), slow)
    assert len(seconds) == 100
    _, plain = generated((), slow)
    assert sum(seconds) < 1.02 * sum(plain) + 2 * slow.step_s(5, 100, 100)


def test_share_of_right_drafts_by_depth_is_the_given_one() -> None:
    drafts = SimulatedDrafts((0.8, 0.5), seed=1)
    nums = [list(draft.token_ids).count(-1) for draft in drafts.propose([new_state([1])] * 4000, [3] * 4000)]
    first, second, third = (sum(num > depth for num in nums) / 4000 for depth in range(3))
    assert (first, second / first, third / second) == pytest.approx((0.8, 0.5, 0.5), abs=0.03)


def test_measured_cost_of_rows_is_the_device_s() -> None:
    cost = H100.step_cost(40)
    assert cost.seconds(1) == pytest.approx(H100.step_s(1, 0, 0))
    assert cost.seconds(40) == pytest.approx(H100.step_s(40, 0, 0))
    assert cost.context_s * 1000 == pytest.approx(H100.step_s(1, 101_000, 0) - H100.step_s(1, 100_000, 0))


@pytest.mark.parametrize(("fields", "message"), [({"draft_acceptance": (1.2,)}, "chances from 0 to 1"), ({"max_drafts": 0}, "max_drafts")])
def test_wrong_chances_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimulationConfig(**fields)
