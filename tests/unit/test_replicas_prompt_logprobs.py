"""Log-probabilities of the prompt's own tokens, against transformers' log_softmax of the same model."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from kvcache.block_pool import BlockPool
from replicas.engine.disaggregated import DisaggregatedEngine
from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.model.runner import StepResult
from replicas.request import FinishReason, GenerationRequest, RequestKey, RequestProgress, RequestRejected, TokenLogprob, merge_progress
from replicas.sampling_params import SamplingParams
from replicas.scheduling.scheduler import Scheduler
from tests.engine_harness import Generated, run
from tests.tiny_llama import save_tiny_llama, shared_prompts

SCORE_ONLY = SamplingParams(max_tokens=0, prompt_logprobs=3)
SCORE_AND_GO_ON = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, prompt_logprobs=3, logprobs=0)
MAX_MODEL_LEN = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    """Several share a beginning; the last ones are as short and as long as a prompt can be."""
    shared = shared_prompts(6, max_tokens=MAX_MODEL_LEN)
    return [*(tuple(ids[: MAX_MODEL_LEN - 10]) for ids in shared), (7,), tuple(shared[0])]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """For each prompt the log-probabilities [its length - 1, vocabulary] of what follows each position."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1) for prompt in prompts]


def make(folder: Path, **settings: Any) -> Engine:
    chosen = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "block_size": 8, "kv_cache_bytes": 1 << 20, **settings}
    return load_engine(EngineConfig(model=str(folder), dtype="float32", num_threads=1, max_model_len=MAX_MODEL_LEN, **chosen))


@pytest.fixture(scope="module", params=["native", "transformers"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    made = make(folder, runner=request.param)
    yield made
    made.close()


def scoring(prompts: list[tuple[int, ...]], params: SamplingParams = SCORE_ONLY, name: str = "s") -> list[GenerationRequest]:
    return [GenerationRequest(request_id=f"{name}{i}", prompt_ids=prompt, params=params, seed=i) for i, prompt in enumerate(prompts)]


def check(found: Generated, prompt: tuple[int, ...], expected_TV: torch.Tensor) -> None:
    assert found.prompt_logprobs is not None, "never reported"
    assert [token.token_id for token in found.prompt_logprobs] == list(prompt[1:])
    for position, token in enumerate(found.prompt_logprobs):
        assert token.logprob == pytest.approx(float(expected_TV[position, token.token_id]), abs=2e-4)
        best = expected_TV[position].topk(3)
        assert [top_id for top_id, _ in token.top] == best.indices.tolist()
        assert [value for _, value in token.top] == pytest.approx(best.values.tolist(), abs=2e-4)


def test_prompts_alone_in_chunks_and_in_one_batch_score_as_transformers(
    engine: Engine, prompts: list[tuple[int, ...]], expected: list[torch.Tensor]
) -> None:
    for results in (run(engine, scoring(prompts)), [run(engine, [request])[0] for request in scoring(prompts)]):
        for found, prompt, logprobs_TV in zip(results, prompts, expected, strict=True):
            check(found, prompt, logprobs_TV)
            assert (found.token_ids, found.finish_reason, found.num_cached_tokens) == ([], FinishReason.LENGTH, 0)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_scored_prompts_go_on_as_unscored_ones_and_fill_the_cache_for_them(
    engine: Engine, prompts: list[tuple[int, ...]], expected: list[torch.Tensor]
) -> None:
    short = prompts[:-1]
    plain = scoring(short, replace(SCORE_AND_GO_ON, prompt_logprobs=None), "plain")
    wanted = run(engine, plain)
    both = run(engine, [*scoring(short, SCORE_AND_GO_ON, "go"), *(replace(one, request_id=f"again-{one.request_id}") for one in plain)])
    for found, again, known, prompt, logprobs_TV in zip(both[: len(short)], both[len(short) :], wanted, short, expected, strict=False):
        check(found, prompt, logprobs_TV)
        assert found.token_ids == again.token_ids == known.token_ids
        assert len(found.logprobs) == 6
        assert found.num_cached_tokens == 0
        assert again.num_cached_tokens == (len(prompt) - 1) // 8 * 8
        assert again.prompt_logprobs is None


SMALL_POOL_BYTES = 14 * 8 * 3 * 2 * 2 * 16 * 4
"""14 blocks of 8 tokens."""


def test_preempted_answers_report_their_prompts_once(folder: Path, prompts: list[tuple[int, ...]], expected: list[torch.Tensor]) -> None:
    engine = make(folder, kv_cache_bytes=SMALL_POOL_BYTES)  # four prompts of 3 blocks fit, which then want 8 each
    cut = [prompt[:24] for prompt in prompts[:6]]
    results = run(engine, scoring(cut, replace(SCORE_AND_GO_ON, max_tokens=40)))
    assert engine.stats().num_preemptions > 0, "the pool was meant to be too small"
    for found, prompt, logprobs_TV in zip(results, cut, expected, strict=False):
        check(found, prompt, logprobs_TV)
        assert len(found.token_ids) == 40
    engine.close()


def test_prompt_preempted_halfway_is_reported_once_and_whole(
    folder: Path, prompts: list[tuple[int, ...]], expected: list[torch.Tensor]
) -> None:
    engine = make(folder, kv_cache_bytes=SMALL_POOL_BYTES)
    (slow,), (urgent,) = scoring(prompts[:1], name="slow"), scoring(prompts[1:2], name="urgent")
    engine.add_request(replace(slow, priority=5))
    progress = list(engine.step().progress)
    assert engine.stats().num_running == 1
    engine.add_request(urgent)
    while engine.has_work:
        progress += engine.step().progress
    assert engine.stats().num_preemptions == 1, "the urgent one was meant to take its place"
    for request, logprobs_TV in ((slow, expected[0]), (urgent, expected[1])):
        (reported,) = [item.prompt_logprobs for item in progress if item.key == request.key and item.prompt_logprobs is not None]
        check(Generated(prompt_logprobs=reported), request.prompt_ids, logprobs_TV)
    engine.close()


@pytest.mark.parametrize("max_num_scored_tokens", [1, 5, 1000])
def test_rows_of_logits_a_step_are_bounded_and_others_go_on(
    folder: Path, prompts: list[tuple[int, ...]], expected: list[torch.Tensor], max_num_scored_tokens: int
) -> None:
    engine = make(folder, max_num_batched_tokens=64)
    engine.scheduler.config = replace(engine.scheduler.config, max_num_scored_tokens=max_num_scored_tokens)
    largest = 0
    forward = engine._runner.forward

    def measured(step: Any) -> StepResult:
        nonlocal largest
        largest = max(largest, len(step.logit_rows))
        return forward(step)

    engine._runner.forward = measured
    plain = scoring([prompts[0]], replace(SCORE_AND_GO_ON, prompt_logprobs=None), "plain")
    *scored, other = run(engine, [*scoring(prompts[1:4]), *plain])
    for found, prompt, logprobs_TV in zip(scored, prompts[1:], expected[1:], strict=False):
        check(found, prompt, logprobs_TV)
    assert len(other.token_ids) == 6
    assert largest <= max_num_scored_tokens + 4
    engine.close()


def test_resent_request_with_tokens_reports_the_prompt_no_second_time(engine: Engine, prompts: list[tuple[int, ...]]) -> None:
    (request,) = scoring(prompts[:1], SCORE_AND_GO_ON)
    (whole,) = run(engine, [request])
    (rest,) = run(engine, [replace(request, output_ids=tuple(whole.token_ids[:2]), attempt=1)])
    assert (rest.token_ids, rest.prompt_logprobs) == (whole.token_ids[2:], None)
    (repeated,) = run(engine, [replace(request, attempt=1)])
    assert repeated.prompt_logprobs == whole.prompt_logprobs


def test_logits_that_are_not_finite_fail_the_request_when_its_prompt_is_through(folder: Path, prompts: list[tuple[int, ...]]) -> None:
    engine = make(folder)
    forward = engine._runner.forward
    steps = iter([True])

    def poisoned(step: Any) -> StepResult:
        logits_NV = forward(step).logits_NV.clone()
        if next(steps, False):
            logits_NV[3] = math.nan
        return StepResult(logits_NV=logits_NV)

    engine._runner.forward = poisoned
    (failed,) = run(engine, scoring(prompts[:1], SCORE_AND_GO_ON))
    assert (failed.finish_reason, failed.token_ids) == (FinishReason.FAILED, [])
    assert "not finite" in (failed.error or "")
    assert engine.stats().num_cached_blocks == 0
    engine.close()


def test_disaggregated_pair_scores_on_one_engine(folder: Path, prompts: list[tuple[int, ...]], expected: list[torch.Tensor]) -> None:
    pair = DisaggregatedEngine.load(
        EngineConfig(model=str(folder), dtype="float32", num_threads=1, max_model_len=MAX_MODEL_LEN, kv_cache_bytes=1 << 20, block_size=8)
    )
    plain = scoring(prompts[:1], replace(SCORE_AND_GO_ON, prompt_logprobs=None), "plain")
    results = run(pair, [*plain, *scoring(prompts[:1], SCORE_AND_GO_ON), *scoring(prompts[-1:], name="only")], check=False)
    check(results[1], prompts[0], expected[0])
    check(results[2], prompts[-1], expected[-1])
    assert results[0].token_ids == results[1].token_ids
    pair.close()


def test_handoff_of_a_request_that_wants_them_is_rejected(engine: Engine) -> None:
    (request,) = scoring([(5, 6, 7)])
    with pytest.raises(RequestRejected, match="prompt_logprobs are computed by one engine alone"):
        Scheduler(engine.scheduler.config, BlockPool(64, 8)).add(replace(request, wants_handoff=True))


def test_merged_progress_keeps_what_came_first() -> None:
    key, scored = RequestKey("r", 0), (TokenLogprob(5, -1.0, ()),)
    first = RequestProgress(key=key, attempt=0, token_ids=(1,), prompt_logprobs=scored)
    later = RequestProgress(key=key, attempt=0, token_ids=(2,))
    assert merge_progress(first, later).prompt_logprobs == scored
    assert merge_progress(later, later).prompt_logprobs is None
    assert merge_progress(replace(first, prompt_logprobs=()), later).prompt_logprobs == ()


def test_only_the_first_choice_asks_unless_nothing_else_is_asked_for() -> None:
    params = SamplingParams(n=2, prompt_logprobs=1)
    assert [params.for_choice(choice).prompt_logprobs for choice in range(2)] == [1, None]
    assert [replace(params, max_tokens=0).for_choice(choice).prompt_logprobs for choice in range(2)] == [1, 1]
    with pytest.raises(ValueError, match=r"^prompt_logprobs must be"):
        SamplingParams(prompt_logprobs=21)
