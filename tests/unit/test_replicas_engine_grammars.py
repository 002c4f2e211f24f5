"""Grammars in the engine, against a reference that draws one token after the other with the mask applied by hand."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from kvcache.block_pool import BlockPool
from replicas.engine.engine import Engine
from replicas.engine.grammar_requests import GrammarRequests
from replicas.model_description import ModelDescription
from replicas.native.build import load_native_library
from replicas.request import FailureCause, FinishReason, GenerationRequest, RequestKey, RequestProgress, RequestRejected
from replicas.sampling.native_draw import NativeDraw
from replicas.sampling.philox import uniforms
from replicas.sampling.sampler import Sampler
from replicas.sampling_params import SamplingParams
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.scheduler import Scheduler
from replicas.scheduling.scheduler_config import SchedulerConfig
from tests.engine_harness import Generated, run
from tests.scripted_proposer import ScriptedProposer, eager_speculator
from tests.unit.hand_grammar import AutomatonMatcher, HandCompiler, grammar
from tests.unit.table_runner import VOCAB_SIZE, TableRunner

EOS = 49
DIGITS = range(1, 10)
OPEN, KEY, SEPARATOR, MORE, CLOSE = 10, 11, 12, 13, 14
NUMBERS = {
    0: {OPEN: 1},
    1: {KEY: 2},
    2: {SEPARATOR: 3},
    3: dict.fromkeys(DIGITS, 4),
    4: {**dict.fromkeys(DIGITS, 4), MORE: 5},
    5: {OPEN: 1, CLOSE: 6},
}
"""Numbers, each behind OPEN KEY SEPARATOR and before MORE. Behind MORE the text may end, continue, or close, which must end it."""


def numbers(**settings: object) -> AutomatonMatcher:
    return AutomatonMatcher(NUMBERS, frozenset({5, 6}), EOS, **settings)


COMPILERS: dict[str, Callable[[], AutomatonMatcher]] = {
    "numbers": numbers,
    "numbers, none forced": lambda: numbers(forces=False),
    "breaks": lambda: numbers(breaks_at=6),
    "slow numbers": numbers,
}
PROMPTS = ([1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [20, 21])


@contextmanager
def engine_with(
    compiler: HandCompiler | None = None,
    *,
    num_blocks: int = 60,
    budget: int = 32,
    native: NativeDraw | None = None,
    draft: Callable[[RequestState, int], Sequence[int]] | None = None,
) -> Iterator[tuple[Engine, HandCompiler]]:
    made = compiler or HandCompiler(COMPILERS)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=64, eos_token_ids=frozenset({EOS}))
    scheduler = Scheduler(config, BlockPool(num_blocks, 4))
    engine = Engine(
        scheduler=scheduler,
        runner=TableRunner(),
        sampler=Sampler(VOCAB_SIZE, native),
        description=ModelDescription(max_model_len=64, vocab_size=VOCAB_SIZE, block_size=4, dtype="float32", tokenizer_source="none"),
        speculator=None if draft is None else eager_speculator(scheduler.drafts, ScriptedProposer(draft)),
        grammars=GrammarRequests(lambda: made, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS})),
    )
    try:
        yield engine, made
        assert engine.stats().num_free_blocks == num_blocks
    finally:
        engine.close()


def request(
    number: int, params: SamplingParams, output: Sequence[int] = (), *, choice: int = 0, attempt: int = 0, name: str = "r"
) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{name}{number}",
        prompt_ids=tuple(PROMPTS[number]),
        params=params,
        seed=number,
        output_ids=tuple(output),
        choice=choice,
        attempt=attempt,
    )


def reference(asked: GenerationRequest) -> Generated:
    """Every token drawn, none forced, by the definitions of the settings alone."""
    params, tokens, output = asked.params, list(asked.prompt_ids), list[int]()
    matcher = None if params.grammar is None else COMPILERS[params.grammar.text]()
    while True:
        logits = TableRunner().row(tokens[-1], len(tokens) - 1).double().numpy().copy()
        for token_id in set(tokens):
            logits[token_id] *= params.repetition_penalty if logits[token_id] < 0 else 1 / params.repetition_penalty
        for token_id in output:
            logits[token_id] -= params.frequency_penalty
        for token_id in set(output):
            logits[token_id] -= params.presence_penalty
        for token_id, bias in params.logit_bias.items():
            logits[token_id] += bias
        allowed = set(range(VOCAB_SIZE)) if matcher is None else set(matcher.allowed())
        hidden = {EOS, *params.stop_token_ids} if len(output) < params.min_tokens else set()
        if params.ignore_eos and matcher is not None:
            hidden = hidden | {EOS}
        allowed = (allowed - hidden) or allowed
        forbidden = [token_id for token_id in range(VOCAB_SIZE) if token_id not in allowed]
        logits[forbidden] = -math.inf
        token_id = int(logits.argmax()) if params.temperature == 0 else drawn(logits, params, asked, len(output))
        tokens.append(token_id)
        output.append(token_id)
        if matcher is not None:
            matcher.accept(token_id)
        is_stop = token_id in params.stop_token_ids or (token_id == EOS and not params.ignore_eos)
        if is_stop and len(output) > params.min_tokens:
            return Generated(token_ids=output, finish_reason=FinishReason.STOP)
        if matcher is not None and (matcher.must_end or token_id == EOS):
            return Generated(token_ids=output, finish_reason=FinishReason.STOP)
        if len(output) == params.max_tokens:
            return Generated(token_ids=output, finish_reason=FinishReason.LENGTH)


def drawn(logits: np.ndarray, params: SamplingParams, asked: GenerationRequest, position: int) -> int:
    scaled = (logits - logits.max()) / params.temperature
    if params.top_k:
        scaled[scaled < np.sort(scaled)[-params.top_k]] = -math.inf
    probs = np.exp(scaled)
    draw = uniforms([asked.seed], [asked.choice], [position])[0]
    return int(np.searchsorted(probs.cumsum(), draw * probs.sum(), side="right"))


SETTINGS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "top_k": {"temperature": 1.5, "top_k": 3},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "bias": {"temperature": 0.8, "logit_bias": {7: 3.0, MORE: 1.0, 30: 100.0, OPEN: -100.0}},
    "min_tokens": {"temperature": 1.0, "min_tokens": 12, "logit_bias": {EOS: 5.0}},
    "min_tokens beyond the end": {"temperature": 1.0, "min_tokens": 30, "logit_bias": {CLOSE: 5.0}},
    "ignore_eos": {"temperature": 1.0, "ignore_eos": True, "logit_bias": {EOS: 5.0}},
    "stop token": {"temperature": 1.0, "stop_token_ids": (3, SEPARATOR), "min_tokens": 3},
    "cut": {"temperature": 1.0, "max_tokens": 9},
    "cut in what is forced": {"temperature": 0.0, "max_tokens": 2},
}


def params_for(name: str, spec: str | None) -> SamplingParams:
    settings = {"max_tokens": 40, **SETTINGS[name]}
    return SamplingParams(grammar=None if spec is None else grammar(spec), **settings)


def results(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Generated]:
    return [replace(result, num_cached_tokens=0, logprobs=[]) for result in run(engine, requests)]


@pytest.fixture(scope="module")
def compiled() -> NativeDraw:
    return NativeDraw(load_native_library())


@pytest.mark.parametrize("spec", ["numbers", "numbers, none forced"])
@pytest.mark.parametrize("name", SETTINGS)
def test_batch_of_constrained_and_free_rows_equals_each_by_the_reference(name: str, spec: str, compiled: NativeDraw) -> None:
    """Drawn by torch and by the compiled kernel."""
    params = [params_for(name, spec), params_for(name, None), params_for(name, spec), params_for("greedy", None)]
    requests = [request(number, one) for number, one in enumerate(params)]
    expected = [reference(one) for one in requests]
    for native in (None, compiled):
        with engine_with(native=native) as (engine, _):
            assert results(engine, requests) == expected


def test_forced_tokens_take_no_step_and_are_counted() -> None:
    """Each number begins with three forced tokens: the first behind the prompt is drawn, since nothing is forced before a first draw."""
    asked = request(0, params_for("greedy", "numbers"))
    expected = reference(asked).token_ids
    num_steps = {}
    for spec in ("numbers", "numbers, none forced"):
        with engine_with() as (engine, _):
            (result,) = results(engine, [request(0, params_for("greedy", spec))])
            assert result.token_ids == expected
            num_steps[spec] = engine.stats().num_steps
            num_forced = engine.stats().grammars.num_forced_tokens
        assert num_steps[spec] == len(expected) - num_forced
    in_runs = sum(token_id in (KEY, SEPARATOR) for token_id in expected)
    assert num_steps["numbers, none forced"] - num_steps["numbers"] == in_runs > 0


def test_choices_of_one_request_follow_the_grammar_each_by_itself() -> None:
    params = params_for("sampled", "numbers")
    requests = [request(0, params, choice=choice) for choice in range(4)]
    with engine_with() as (engine, _):
        found = results(engine, requests)
    assert found == [reference(one) for one in requests]
    assert len({tuple(one.token_ids) for one in found}) > 1


def test_logprobs_are_those_of_the_model_one_for_each_token_that_the_grammar_forces_too() -> None:
    params = replace(params_for("sampled", "numbers"), logprobs=2)
    with engine_with() as (engine, _):
        (result,) = run(engine, [request(0, params)])
        assert engine.stats().grammars.num_forced_tokens == 0
    expected = reference(request(0, params))
    assert result.token_ids == expected.token_ids
    tokens = [*PROMPTS[0], *expected.token_ids]
    for place, logprob in enumerate(result.logprobs):
        position = len(PROMPTS[0]) + place - 1
        assert logprob.logprob == pytest.approx(TableRunner().row(tokens[position], position).log_softmax(-1)[logprob.token_id].item())
    assert len(result.logprobs) == len(result.token_ids)


@pytest.mark.parametrize("name", ["sampled", "penalties", "min_tokens"])
def test_preemption_and_prompts_in_chunks_change_nothing(name: str) -> None:
    """17 blocks of 4 tokens cannot hold four requests of up to 40 tokens."""
    requests = [request(number, params_for(name, "numbers")) for number in range(4)]
    with engine_with(num_blocks=17, budget=5) as (engine, _):
        found = results(engine, requests)
        assert engine.stats().num_preemptions > 0
    assert found == [reference(one) for one in requests]


@pytest.mark.parametrize("name", ["sampled", "penalties", "min_tokens", "ignore_eos"])
def test_request_resumed_at_any_token_continues_to_the_same_text(name: str) -> None:
    params = params_for(name, "numbers")
    whole = reference(request(0, params))
    cuts = range(len(whole.token_ids))
    with engine_with() as (engine, _):
        rests = results(engine, [request(0, params, whole.token_ids[:cut], attempt=1, name=f"{cut}-") for cut in cuts])
    for cut, rest in zip(cuts, rests, strict=True):
        assert (whole.token_ids[:cut] + rest.token_ids, rest.finish_reason) == (whole.token_ids, whole.finish_reason)


def test_resumed_text_that_is_already_whole_ends_with_stop_and_without_a_token() -> None:
    with engine_with() as (engine, _):
        (result,) = run(engine, [request(0, params_for("greedy", "numbers"), [OPEN, KEY, SEPARATOR, 5, MORE, CLOSE], attempt=1)])
        assert (result.token_ids, result.finish_reason) == ([], FinishReason.STOP)
        assert engine.stats().num_steps == 0


def test_resumed_text_that_breaks_its_grammar_fails() -> None:
    with engine_with() as (engine, _):
        engine.add_request(request(0, params_for("greedy", "numbers"), [KEY], attempt=1))
        (ending,) = endings(engine)
    assert (ending.finish_reason, ending.failure_cause) == (FinishReason.FAILED, FailureCause.GRAMMAR_BROKEN)


def test_grammar_that_breaks_fails_its_request_alone_with_the_reason() -> None:
    free = request(1, params_for("greedy", None))
    with engine_with() as (engine, _):
        engine.add_request(request(0, params_for("greedy", "breaks")))
        engine.add_request(free)
        by_id = {item.key.request_id: item for item in endings(engine)}
    assert by_id["r0"].finish_reason is FinishReason.FAILED
    assert by_id["r0"].error == "the grammar became too complex after 6 tokens"
    assert by_id["r0"].failure_cause is FailureCause.GRAMMAR_BROKEN
    assert by_id["r1"].finish_reason is reference(free).finish_reason


def endings(engine: Engine) -> list[RequestProgress]:
    found = []
    while engine.has_work:
        found += [item for item in engine.step().progress if item.finish_reason is not None]
        engine.check()
    return found


@pytest.mark.parametrize("name", ["greedy", "sampled", "penalties"])
def test_drafts_of_any_quality_change_no_constrained_token(name: str) -> None:
    """The first drafts are right and the rest are not; right ones may lead to the end of a text, wrong ones beyond it."""
    random = np.random.default_rng(3)
    asked = [request(number, params_for(name, spec)) for number, spec in enumerate(("numbers", "numbers, none forced", "numbers"))]
    expected = [reference(one) for one in asked]
    answers = {one.key: answer.token_ids for one, answer in zip(asked, expected, strict=True)}

    def draft(state: RequestState, _: int) -> Sequence[int]:
        right = answers[state.key][state.num_output_tokens :][: int(random.integers(0, 6))]
        return [*right, *random.integers(0, VOCAB_SIZE, 3).tolist()]

    with engine_with(draft=draft) as (engine, _):
        assert results(engine, asked) == expected
        (drafts,) = engine.stats().drafts
    assert 0 < drafts.num_accepted < drafts.num_drafted


def test_slow_grammar_holds_up_neither_free_requests_nor_other_grammars() -> None:
    with engine_with() as (engine, compiler):
        compiler.gate.clear()
        slow, quick, free = (request(n, params_for("greedy", spec)) for n, spec in enumerate(("slow numbers", "numbers", None)))
        for one in (slow, quick, free):
            engine.add_request(one)
        assert engine.stats().num_waiting == 3
        ended: list[RequestProgress] = []
        while len(ended) < 2:
            ended += [item for item in engine.step().progress if item.finish_reason is not None]
        assert {item.key for item in ended} == {quick.key, free.key}
        assert engine.has_work
        compiler.gate.set()
        assert [item.key for item in endings(engine)] == [slow.key]


def test_cancel_of_a_request_whose_grammar_is_compiled_ends_it_once_and_frees_its_name() -> None:
    with engine_with() as (engine, compiler):
        compiler.gate.clear()
        slow = request(0, params_for("greedy", "slow numbers"))
        engine.add_request(slow)
        with pytest.raises(RequestRejected, match="already running"):
            engine.add_request(request(0, params_for("greedy", None)))
        assert engine.cancel(slow.key)
        assert not engine.cancel(slow.key)
        again = request(0, params_for("greedy", "numbers"), attempt=1)
        engine.add_request(again)
        compiler.gate.set()
        found = [(item.attempt, item.finish_reason) for item in endings(engine)]
    assert found == [(0, FinishReason.CANCELLED), (1, reference(again).finish_reason)]


def test_grammar_that_cannot_be_compiled_fails_its_request_as_refused() -> None:
    with engine_with() as (engine, _):
        engine.add_request(request(0, replace(params_for("greedy", None), grammar=grammar("x"))))
        (ending,) = endings(engine)
    assert (ending.finish_reason, ending.failure_cause) == (FinishReason.FAILED, FailureCause.GRAMMAR_REFUSED)
    assert ending.error == "no grammar is called 'x'"


def test_tokenizer_that_cannot_be_constrained_is_said_to_each_request() -> None:
    def broken() -> HandCompiler:
        raise ValueError("its tokenizer has no tokenizer.json")

    grammars = GrammarRequests(broken, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))
    asked = request(0, params_for("greedy", "numbers"))
    grammars.begin(asked, max_tokens=5)
    until_s = time.monotonic() + 30
    ended: list[RequestProgress] = []
    while not ended and time.monotonic() < until_s:
        grammars.wait()
        ended = grammars.collect()[1]
    assert ended[0].error == "this model's answers cannot follow a grammar: its tokenizer has no tokenizer.json"
    with pytest.raises(RequestRejected, match=r"no tokenizer\.json"):
        grammars.begin(replace(asked, request_id="b"), max_tokens=5)
    grammars.close()


def test_engine_without_a_compiler_rejects_grammars() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
    description = ModelDescription(max_model_len=64, vocab_size=VOCAB_SIZE, block_size=4, dtype="float32", tokenizer_source="none")
    engine = Engine(
        scheduler=Scheduler(config, BlockPool(32, 4)), runner=TableRunner(), sampler=Sampler(VOCAB_SIZE), description=description
    )
    with pytest.raises(RequestRejected, match="without a compiler"):
        engine.add_request(request(0, params_for("greedy", "numbers")))
    assert not engine.has_work


def test_compiler_learns_how_many_tokens_the_answer_may_have() -> None:
    with engine_with() as (engine, compiler):
        run(engine, [request(0, params_for("cut", "numbers")), request(1, replace(params_for("greedy", "numbers"), max_tokens=None))])
    assert sorted(compiler.max_tokens) == [9, 64 - len(PROMPTS[1])]


def test_too_long_prompt_with_a_grammar_is_rejected_before_it_is_compiled() -> None:
    with engine_with() as (engine, compiler):
        with pytest.raises(RequestRejected, match="max_model_len 64"):
            engine.add_request(replace(request(0, params_for("greedy", "numbers")), prompt_ids=(1,) * 64))
        assert compiler.max_tokens == []
        assert RequestKey("r0", 0) not in {state.key for state in engine.scheduler.waiting}
