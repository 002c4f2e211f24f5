"""Masks that take longer than a step waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

import replicas.engine.mask_filler as mask_filler
from replicas.engine.engine import Engine
from replicas.engine.grammar_requests import MAX_FORCED_CHARS
from replicas.request import FinishReason, GenerationRequest, RequestProgress
from replicas.sampling.grammar_mask import GrammarMask
from replicas.scheduling.request_state import RequestState
from tests.engine_harness import Generated
from tests.unit.hand_grammar import AutomatonMatcher, Gate, GatedMatcher, HandCompiler, grammar
from tests.unit.table_runner import VOCAB_SIZE
from tests.unit.test_replicas_engine_grammars import (
    EOS,
    KEY,
    NUMBERS,
    OPEN,
    SEPARATOR,
    SETTINGS,
    engine_with,
    numbers,
    params_for,
    reference,
    request,
    results,
)

LONG = "numbers".ljust(MAX_FORCED_CHARS + 1)


class Gates:
    """Owns the gate of all slow masks."""

    def __init__(self) -> None:
        self.gate = Gate()

    def compiler(self, *, num_quick: int = 0, forces: bool = True) -> HandCompiler:
        def gated() -> AutomatonMatcher:
            return GatedMatcher(NUMBERS, frozenset({5, 6}), EOS, self.gate, num_quick=num_quick, forces=forces)

        return HandCompiler({"numbers": numbers, "gated": gated, LONG: numbers})

    def run(self, engine: Engine, requests: Sequence[GenerationRequest]) -> list[Generated]:
        """Each step finds masks late, and only then lets one of them through."""
        found = {one.key: Generated() for one in requests}
        for one in requests:
            engine.add_request(one)
        while engine.has_work:
            for item in engine.step(may_wait=False).progress:
                result = found[item.key]
                assert result.finish_reason is None, "progress after the end"
                result.token_ids += item.token_ids
                result.logprobs += item.logprobs
                if item.prompt_logprobs is not None:
                    result.prompt_logprobs = item.prompt_logprobs
                result.finish_reason = item.finish_reason
                result.error = item.error
            engine.check()
            self.gate.let_one_through()
        return list(found.values())


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Gates:
    monkeypatch.setattr(mask_filler, "LATE_AFTER_S", 0.001)
    monkeypatch.setattr(mask_filler, "SLOW_S", 0.0)  # a gate takes no time of the processor
    return Gates()


def asked_with(name: str, spec: str | None, number: int) -> GenerationRequest:
    return request(number, params_for(name, spec))


def expected_of(requests: Sequence[GenerationRequest]) -> list[Generated]:
    """A slow grammar gives the tokens of the quick one."""
    quick = [replace(one.params, grammar=one.params.grammar and grammar("numbers")) for one in requests]
    return [reference(replace(one, params=params)) for one, params in zip(requests, quick, strict=True)]


@pytest.mark.parametrize("num_quick", [0, 4])
def test_slow_mask_holds_up_neither_free_requests_nor_other_grammars(gates: Gates, num_quick: int) -> None:
    slow, quick, free = (asked_with("greedy", spec, number) for number, spec in enumerate(("gated", "numbers", None)))
    expected = expected_of([slow, quick, free])
    with engine_with(gates.compiler(num_quick=num_quick)) as (engine, _):
        for one in (slow, quick, free):
            engine.add_request(one)
        tokens: dict[str, list[int]] = {one.request_id: [] for one in (slow, quick, free)}
        ended: list[RequestProgress] = []
        while len(ended) < 2:
            for item in engine.step().progress:
                tokens[item.key.request_id] += item.token_ids
                ended += [item] if item.finish_reason is not None else []
            engine.check()
        while not engine.scheduler.running[0].awaits_draw:
            engine.step()
        assert {item.key for item in ended} == {quick.key, free.key}
        assert [tokens[one.request_id] for one in (quick, free)] == [result.token_ids for result in expected[1:]]
        assert tokens[slow.request_id] == expected[0].token_ids[:num_quick]
        while engine.has_work:
            gates.gate.let_one_through()
            for item in engine.step().progress:
                tokens[item.key.request_id] += item.token_ids
        assert tokens[slow.request_id] == expected[0].token_ids


@pytest.mark.parametrize("forces", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_token_drawn_late_is_the_one_that_its_step_would_have_drawn(gates: Gates, name: str, forces: bool) -> None:
    requests = [asked_with(name, spec, number) for number, spec in enumerate(("gated", None, "gated", "numbers"))]
    with engine_with(gates.compiler(forces=forces)) as (engine, _):
        assert gates.run(engine, requests) == expected_of(requests)
        assert engine.stats().grammars.num_late_masks > 0


def test_preempted_request_draws_its_late_token_once(gates: Gates) -> None:
    """17 blocks of 4 tokens cannot hold four requests of up to 40 tokens, so some lose their blocks while a mask is computed."""
    requests = [asked_with("sampled", spec, number) for number, spec in enumerate(("gated", "gated", None, "gated"))]
    with engine_with(gates.compiler(), num_blocks=17, budget=5) as (engine, _):
        assert gates.run(engine, requests) == expected_of(requests)
        assert engine.stats().num_preemptions > 0


def test_late_tokens_bring_their_logprobs_and_those_of_the_prompt(gates: Gates) -> None:
    params = replace(params_for("sampled", "numbers"), logprobs=2, prompt_logprobs=1)
    slow = replace(params, grammar=grammar("gated"))
    with engine_with() as (engine, _):
        (expected,) = results(engine, [request(0, params)])
    with engine_with(gates.compiler()) as (engine, _):
        (found,) = gates.run(engine, [request(0, slow)])
        assert engine.stats().grammars.num_late_masks == len(found.token_ids)
    assert len(found.logprobs) == len(found.token_ids) > 0
    assert (found.token_ids, found.prompt_logprobs) == (expected.token_ids, expected.prompt_logprobs)


def test_slow_masks_with_drafts_change_no_token(gates: Gates) -> None:
    """A request gets no drafts once a mask of it was late: masks behind drafts are computed by the step itself."""
    random = np.random.default_rng(3)
    requests = [asked_with("sampled", spec, number) for number, spec in enumerate(("gated", "numbers", None))]
    expected = expected_of(requests)
    answers = {one.key: answer.token_ids for one, answer in zip(requests, expected, strict=True)}

    def draft(state: RequestState, _: int) -> Sequence[int]:
        assert state.sampling.mask is None or not state.sampling.mask.is_slow, "it would hold up the step"
        right = answers[state.key][state.num_output_tokens :][: int(random.integers(0, 6))]
        return [*right, *random.integers(0, VOCAB_SIZE, 3).tolist()]

    with engine_with(gates.compiler(), draft=draft) as (engine, _):
        assert gates.run(engine, requests) == expected
        (drafts,) = engine.stats().drafts
    assert drafts.num_accepted > 0


def test_request_cancelled_before_its_mask_is_ready_frees_its_blocks_at_once(gates: Gates) -> None:
    slow = asked_with("greedy", "gated", 0)
    with engine_with(gates.compiler()) as (engine, _):
        engine.add_request(slow)
        while not (engine.scheduler.running and engine.scheduler.running[0].awaits_draw):
            engine.step()
        assert engine.cancel(slow.key)
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
        (ending,) = engine.step().progress
        assert ending.finish_reason is FinishReason.CANCELLED
        assert not engine.has_work
        again = replace(slow, attempt=1)
        gates.gate.let_one_through()
        assert gates.run(engine, [again]) == expected_of([again])


@pytest.mark.parametrize("name", ["greedy", "sampled", "cut in what is forced"])
def test_forced_tokens_of_a_long_grammar_are_drawn(gates: Gates, name: str) -> None:
    requests = [asked_with(name, spec, number) for number, spec in enumerate((LONG, "numbers"))]
    with engine_with(gates.compiler()) as (engine, _):
        (found,) = results(engine, requests[:1])
        assert engine.stats().grammars.num_forced_tokens == 0
        assert [found, *results(engine, requests[1:])] == expected_of(requests)
        assert engine.stats().grammars.num_forced_tokens > 0


def test_search_for_forced_tokens_that_takes_long_is_the_last_one() -> None:
    """By a clock that says how long: at the second reading, and not at the first."""
    times_s = iter([0.0, 0.019, 1.0, 1.02])
    mask = GrammarMask(numbers(), VOCAB_SIZE, frozenset({EOS}), clock=lambda: next(times_s))
    mask.advance(OPEN)
    assert (list(mask.forced_tokens()), mask.is_slow) == ([KEY, SEPARATOR], False)
    assert (list(mask.forced_tokens()), mask.is_slow) == ([KEY, SEPARATOR], True)
    assert list(mask.forced_tokens()) == []
