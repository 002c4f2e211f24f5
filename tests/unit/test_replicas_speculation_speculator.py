"""Drafts of an engine from end to end: who is asked, what is learned, and what happens when a proposer fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch

from kvcache.block_pool import BlockPool
from replicas.attention.step_tensors import StepTensors
from replicas.engine.engine import Engine
from replicas.model.runner import StepResult
from replicas.model_description import ModelDescription
from replicas.request import GenerationRequest, RequestKey
from replicas.sampling.sampler import Sampler
from replicas.sampling_params import SamplingParams
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.scheduler import Scheduler
from replicas.scheduling.scheduler_config import SchedulerConfig
from replicas.scheduling.step_plan import HiddenStates
from replicas.speculation.controller import Controller
from replicas.speculation.prediction import PredictionProposer
from replicas.speculation.speculator import Speculator
from replicas.speculation.step_cost import StepCost
from replicas.stats import DraftStats
from tests.engine_harness import run
from tests.scripted_proposer import ScriptedProposer, eager_speculator

VOCAB_SIZE = 50


class CountingRunner:
    """Token t is followed by t + 1. Hidden states are the tokens themselves."""

    def __init__(self) -> None:
        self.lens: list[list[int]] = []

    def forward(self, step: StepTensors) -> StepResult:
        self.lens.append(step.arrays.lens_R.tolist())
        last = step.token_ids_T[step.logit_rows]
        logits = torch.zeros(len(last), VOCAB_SIZE)
        logits[torch.arange(len(last)), (last + 1) % VOCAB_SIZE] = 1.0
        hidden = None
        if (wanted := step.arrays.hidden) is not None:
            hidden = step.token_ids_T[torch.from_numpy(wanted.rows_K)].float().reshape(1, -1, 1)
        return StepResult(logits_NV=logits, hidden_LKW=hidden)


class Setup:
    """An engine that counts, with proposers."""

    def __init__(self, *proposers: ScriptedProposer | PredictionProposer, cost: StepCost | None = None, max_tokens: int = 3) -> None:
        self.runner = CountingRunner()
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64)
        scheduler = Scheduler(config, BlockPool(64, 4))
        self.speculator = eager_speculator(scheduler.drafts, *proposers, max_tokens=max_tokens)
        if cost is not None:
            controller = Controller(cost)
            self.speculator = Speculator(proposers, controller, scheduler.drafts, max_tokens=max_tokens, clock=lambda: 0.0)
        self.engine = Engine(
            scheduler=scheduler,
            runner=self.runner,
            sampler=Sampler(VOCAB_SIZE),
            description=ModelDescription(max_model_len=64, vocab_size=VOCAB_SIZE, block_size=4, dtype="float32", tokenizer_source="none"),
            speculator=self.speculator,
        )


def request(name: str = "a", first: int = 5, *, max_tokens: int = 12, **fields: object) -> GenerationRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return GenerationRequest(request_id=name, prompt_ids=(first, first + 1, first + 2), params=params, seed=0, **fields)


def counting(state: RequestState, budget: int) -> Sequence[int]:
    return [state.token_ids[-1] + 1 + i for i in range(budget)]


def wrong_behind_the_first(state: RequestState, budget: int) -> Sequence[int]:
    return [state.token_ids[-1] + 1, *[0] * (budget - 1)]


def never(state: RequestState, budget: int) -> Sequence[int]:
    return []


def test_accepted_drafts_save_steps_and_are_counted_by_depth() -> None:
    setup = Setup(ScriptedProposer(wrong_behind_the_first))
    (result,) = run(setup.engine, [request()])
    assert result.token_ids == list(range(8, 20))
    # The prompt's step yields one token; then two a step until one is left, which gets no draft.
    assert setup.runner.lens == [[3], [4], [4], [4], [4], [3], [1]]
    stats = setup.engine.stats()
    assert stats.drafts == (DraftStats(method="scripted", num_passes=5, num_drafted=14, num_accepted=5, accepted_by_depth=(5,)),)
    assert stats.num_generated_tokens == 12


def test_request_that_asks_for_none_gets_no_drafts() -> None:
    proposer = ScriptedProposer(counting)
    setup = Setup(proposer)
    run(setup.engine, [request(speculates=False), request("b", 30)])
    assert {state.key.request_id for state, _ in proposer.asked} == {"b"}


def test_first_proposer_with_a_draft_is_taken_and_a_model_is_asked_for_the_rest() -> None:
    first = ScriptedProposer(lambda state, budget: counting(state, budget) if state.key.request_id == "a" else [], name="first")
    second = ScriptedProposer(lambda state, budget: counting(state, budget) if state.key.request_id == "b" else [], name="second")
    model = ScriptedProposer(counting, name="model", runs_a_model=True)
    setup = Setup(first, second, model)
    results = run(setup.engine, [request(), request("b", 20), request("c", 35)])
    assert [result.token_ids for result in results] == [list(range(8, 20)), list(range(23, 35)), list(range(38, 50))]
    assert {state.key.request_id for state, _ in model.asked} == {"c"}
    assert {one.method: one.num_accepted for one in setup.engine.stats().drafts} == {"first": 8, "second": 8, "model": 8}


def test_model_finds_slots_for_its_drafts_and_slots_that_it_does_not_use_come_back() -> None:
    def check(state: RequestState, budget: int) -> Sequence[int]:
        assert len(state.block_ids) * 4 >= len(state.token_ids) + budget
        return counting(state, budget)[: budget - 1]

    setup = Setup(ScriptedProposer(check, runs_a_model=True), max_tokens=8)
    (result,) = run(setup.engine, [request(max_tokens=20)])
    assert result.token_ids == list(range(8, 28))
    assert max(lens[0] for lens in setup.runner.lens) == 8


def test_hidden_states_that_a_model_wants_are_kept_and_handed_to_it() -> None:
    proposer = ScriptedProposer(never, runs_a_model=True)
    setup = Setup(proposer)
    setup.engine.add_request(request())
    proposer.hidden = HiddenStates(layers=(1,), positions=(range(1, 3),))
    setup.engine.step()
    proposer.hidden = None
    setup.engine.step()
    first, second = proposer.observed
    assert first.hidden_LKW is not None
    assert first.hidden_LKW[0, :, 0].tolist() == [6, 7]
    assert second.hidden_LKW is None


def test_observed_step_says_how_many_drafts_of_each_chunk_were_accepted() -> None:
    proposer = ScriptedProposer(lambda state, budget: (counting if state.key.request_id == "a" else wrong_behind_the_first)(state, budget))
    setup = Setup(proposer)
    for one in (request(), request("b", 20)):
        setup.engine.add_request(one)
    setup.engine.step()
    setup.engine.step()
    assert [list(step.num_accepted) for step in proposer.observed] == [[0, 0], [3, 1]]
    assert [len(chunk.state.token_ids) for chunk in proposer.observed[1].plan.chunks] == [8, 6], "tokens are appended before"


def test_every_request_that_ends_is_forgotten_once_however_it_ends() -> None:
    proposer = ScriptedProposer(counting)
    setup = Setup(proposer)
    for one in (request(), request("b", 20), request("c", 30)):
        setup.engine.add_request(one)
    setup.engine.step()
    setup.engine.cancel(RequestKey("b", 0))
    while setup.engine.has_work:
        setup.engine.step()
    setup.engine.add_request(request("d"))
    setup.engine.step()
    assert sorted(state.key.request_id for state in proposer.forgotten) == ["a", "b", "c"]


def test_proposer_that_fails_is_dropped_and_requests_go_on(caplog: pytest.LogCaptureFixture) -> None:
    def fail(state: RequestState, budget: int) -> Sequence[int]:
        raise RuntimeError("no memory left")

    failing, fine = ScriptedProposer(fail, name="failing"), ScriptedProposer(wrong_behind_the_first, name="fine")
    setup = Setup(failing, fine)
    with caplog.at_level(logging.ERROR):
        (result,) = run(setup.engine, [request()])
    assert result.token_ids == list(range(8, 20))
    assert len(failing.asked) == 1
    assert [record.getMessage() for record in caplog.records] == ["speculation method 'failing' failed; requests go on without it"]
    assert [one.method for one in setup.engine.stats().drafts] == ["fine"]


def test_two_models_are_refused() -> None:
    with pytest.raises(ValueError, match="only one proposer"):
        Setup(*(ScriptedProposer(never, name=name, runs_a_model=True) for name in "ab"))


def test_drafts_that_never_pay_are_not_verified() -> None:
    proposer = ScriptedProposer(lambda state, budget: [0] * budget)
    setup = Setup(proposer, cost=StepCost(num_rows=(1, 2), row_s=(1.0, 1.2)))
    run(setup.engine, [request(max_tokens=25)])
    drafted = [lens[0] - 1 for lens in setup.runner.lens[1:]]
    assert drafted[0] > 0, "it is tried at first"
    assert drafted[8:] == [0] * len(drafted[8:])


def test_predicted_answer_is_drafted_and_what_became_of_it_is_reported() -> None:
    setup = Setup(PredictionProposer(), max_tokens=4)
    setup.engine.add_request(request(predicted_ids=(8, 9, 10, 40, 41, 14, 15, 16, 17, 18, 19)))
    setup.engine.add_request(request("b", 20))
    accepted = rejected = 0
    tokens: list[int] = []
    while setup.engine.has_work:
        for item in setup.engine.step().progress:
            if item.key.request_id == "a":
                accepted, rejected = accepted + item.num_accepted_predicted, rejected + item.num_rejected_predicted
                tokens += item.token_ids
            else:
                assert (item.num_accepted_predicted, item.num_rejected_predicted) == (0, 0)
    assert tokens == list(range(8, 20))
    # 8 | 9 10 (40 41 refused) 11 | 12 | 13 | 14 ... : found again once 14 15 are said, which leaves 16 17 18 as drafts.
    assert (accepted, rejected) == (5, 2)
    assert setup.engine.stats().drafts[0].method == "prediction"
