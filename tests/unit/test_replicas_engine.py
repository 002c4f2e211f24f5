"""The engine around a runner whose logits can be told by hand: token t is followed by t + 1."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from kvcache.block_pool import BlockPool
from replicas.attention.step_tensors import StepTensors
from replicas.engine.engine import Engine
from replicas.model.runner import StepResult
from replicas.model_description import ModelDescription
from replicas.request import FinishReason, GenerationRequest, RequestKey, RequestRejected
from replicas.sampling.sampler import Sampler
from replicas.sampling_params import SamplingParams
from replicas.scheduling.scheduler import Scheduler
from replicas.scheduling.scheduler_config import SchedulerConfig
from tests.engine_harness import requests_for, run

VOCAB_SIZE = 50
EOS = 49


class CountingRunner:
    """Logit 1 for the successor of each row's token, 0 elsewhere. `before` may break a step."""

    def __init__(self) -> None:
        self.before: Callable[[torch.Tensor], None] = lambda logits: None
        self.steps: list[list[int]] = []

    def forward(self, step: StepTensors) -> StepResult:
        self.steps.append(step.token_ids_T.tolist())
        last = step.token_ids_T[step.logit_rows]
        logits = torch.zeros(len(last), VOCAB_SIZE)
        logits[torch.arange(len(last)), (last + 1) % VOCAB_SIZE] = 1.0
        self.before(logits)
        return StepResult(logits_NV=logits)


@pytest.fixture
def runner() -> CountingRunner:
    return CountingRunner()


@pytest.fixture
def engine(runner: CountingRunner) -> Engine:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, eos_token_ids=frozenset({EOS}))
    description = ModelDescription(max_model_len=64, vocab_size=VOCAB_SIZE, block_size=4, dtype="float32", tokenizer_source="none")
    return Engine(
        scheduler=Scheduler(config, BlockPool(32, 4)),
        runner=runner,
        sampler=Sampler(VOCAB_SIZE),
        description=description,
    )


def _requests(prompts: Sequence[Sequence[int]], **params: object) -> list[GenerationRequest]:
    return requests_for(prompts, SamplingParams(**{"temperature": 0.0, "max_tokens": 5, **params}))


def test_run_of_two_requests_counts_up_to_length_and_to_eos(engine: Engine) -> None:
    one, two = run(engine, _requests([[1, 2, 3], [45, 46]]))
    assert (one.token_ids, one.finish_reason) == ([4, 5, 6, 7, 8], FinishReason.LENGTH)
    assert (two.token_ids, two.finish_reason) == ([47, 48, 49], FinishReason.STOP)
    stats = engine.stats()
    assert (stats.num_finished, stats.num_generated_tokens, stats.num_prompt_tokens, stats.num_running) == (2, 8, 5, 0)
    assert stats.num_free_blocks == stats.num_blocks


def test_pause_of_streams_for_an_urgent_prompt_ends_by_the_engines_clock(runner: CountingRunner) -> None:
    now_s = [0.0]
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64, max_urgent_share=0.99, max_urgent_pause_s=1.0)
    description = ModelDescription(max_model_len=64, vocab_size=VOCAB_SIZE, block_size=4, dtype="float32", tokenizer_source="none")
    engine = Engine(
        scheduler=Scheduler(config, BlockPool(64, 4)),
        runner=runner,
        sampler=Sampler(VOCAB_SIZE),
        description=description,
        clock=lambda: now_s[0],
    )
    for number in range(4):
        engine.add_request(replace(_requests([[number + 1]])[0], request_id=f"r{number}", priority=9))
    engine.step()
    engine.add_request(replace(_requests([range(1, 45)])[0], request_id="urgent"))
    for now_s[0] in (0.0, 0.9, 1.0):
        engine.step()
    assert [len(tokens) for tokens in runner.steps[1:]] == [16, 16, 16]
    assert [tokens[0] for tokens in runner.steps[1:3]] == [1, 17], "the prompt alone"
    assert runner.steps[3][0] == 2, "a token for the first stream, whose pause began at 0.0"
    assert engine.stats().num_pauses == 8


def test_step_that_raises_fails_its_requests_and_the_engine_goes_on(engine: Engine, runner: CountingRunner) -> None:
    def break_once(logits: torch.Tensor) -> None:
        runner.before = lambda logits: None
        raise RuntimeError("no memory left")

    runner.before = break_once
    (failed,) = run(engine, _requests([[1, 2, 3, 4, 5, 6]]))
    assert failed.finish_reason is FinishReason.FAILED
    assert "no memory left" in (failed.error or "")
    assert engine.stats().num_cached_blocks == 0
    (fine,) = run(engine, _requests([[1, 2, 3, 4, 5, 6]]))
    assert (fine.token_ids, fine.num_cached_tokens) == ([7, 8, 9, 10, 11], 0)


def test_interrupted_step_leaves_no_block_that_a_later_request_could_find(engine: Engine, runner: CountingRunner) -> None:
    def interrupt(logits: torch.Tensor) -> None:
        runner.before = lambda logits: None
        raise KeyboardInterrupt

    runner.before = interrupt
    (request,) = _requests([[1, 2, 3, 4, 5, 6]])
    engine.add_request(request)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.cancel(request.key)
    engine.step()
    (later,) = run(engine, _requests([[1, 2, 3, 4, 5, 6]]))
    assert later.num_cached_tokens == 0


def test_three_failed_steps_in_a_row_end_the_engine(engine: Engine, runner: CountingRunner) -> None:
    def broken(logits: torch.Tensor) -> None:
        raise RuntimeError("device lost")

    runner.before = broken
    for name in "abc":
        run(engine, requests_for([[1, 2]], prefix=name))
    engine.add_request(requests_for([[1, 2]])[0])
    with pytest.raises(RuntimeError, match="the last 3 steps failed"):
        engine.step()


def test_nan_logits_fail_that_request_alone_and_void_its_blocks(engine: Engine, runner: CountingRunner) -> None:
    def poison_first(logits: torch.Tensor) -> None:
        logits[0] = float("nan")

    runner.before = poison_first
    bad, good = _requests([[1, 2, 3, 4, 5], [10, 11, 12, 13, 14]])
    engine.add_request(bad)
    engine.add_request(good)
    progress = {p.key: p for p in engine.step().progress}
    assert progress[bad.key].finish_reason is FinishReason.FAILED
    assert progress[good.key].token_ids == (15,)
    assert engine.stats().num_cached_blocks == 1


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (_requests([[1, VOCAB_SIZE]])[0], "prompt_ids holds 50; token ids are from 0 to 49"),
        (_requests([[-1]])[0], "prompt_ids holds -1"),
        (replace(_requests([[1]])[0], output_ids=(VOCAB_SIZE,)), "output_ids holds 50"),
        (_requests([[1]], logit_bias={99: 1.0})[0], "logit_bias holds 99"),
        (_requests([[1]], stop_token_ids=(77,))[0], "stop_token_ids holds 77"),
        (replace(_requests([[1]])[0], adapter_id="x"), "adapter_id is 'x'"),
    ],
)
def test_add_of_ids_outside_the_vocabulary_is_rejected_by_name(engine: Engine, request_: GenerationRequest, message: str) -> None:
    with pytest.raises(RequestRejected, match=message):
        engine.add_request(request_)
    assert not engine.has_work


def test_cancel_then_a_newer_attempt_under_the_same_key_gives_both_their_ending(engine: Engine) -> None:
    (first,) = _requests([[1, 2, 3]])
    engine.add_request(first)
    engine.step()
    assert engine.cancel(first.key)
    engine.add_request(replace(first, attempt=1, output_ids=(4,)))
    seen = [(p.attempt, p.token_ids, p.finish_reason) for p in engine.step().progress]
    assert seen == [(0, (), FinishReason.CANCELLED), (1, (5,), None)]
    while engine.has_work:
        engine.step()
    assert engine.stats().num_cancelled == 1
    assert engine.stats().num_finished == 1


def test_min_tokens_suppresses_eos_until_then(engine: Engine) -> None:
    (result,) = run(engine, _requests([[46, 47]], min_tokens=3, max_tokens=8))
    assert EOS not in result.token_ids[:3]


def test_logprobs_come_with_each_token_in_a_mixed_batch(engine: Engine) -> None:
    plain, asked = _requests([[1, 2]])[0], replace(_requests([[5, 6]], logprobs=2)[0], request_id="asked")
    one, two = run(engine, [plain, asked])
    assert one.logprobs == []
    assert [p.token_id for p in two.logprobs] == two.token_ids
    assert all(len(p.top) == 2 for p in two.logprobs)


def test_choices_share_the_prompt_and_are_keyed_apart(engine: Engine, runner: CountingRunner) -> None:
    (base,) = _requests([[1, 2, 3, 4, 5]])
    results = run(engine, [base, replace(base, choice=1)])
    assert [r.token_ids for r in results] == [[6, 7, 8, 9, 10]] * 2
    assert runner.steps[0] == [1, 2, 3, 4, 5, 5]


def test_kv_changes_from_zero_are_events_and_from_the_unknown_the_full_state(engine: Engine) -> None:
    run(engine, _requests([list(range(9))]))
    changes = engine.kv_changes(0)
    assert not changes.is_full_state
    full = engine.kv_changes(None)
    assert full.is_full_state
    assert {e.key for e in full.events} == {e.key for e in changes.events}
    assert full.first_event == len(changes.events)


def test_cancel_of_an_unknown_key_is_false(engine: Engine) -> None:
    assert not engine.cancel(RequestKey("none", 0))
