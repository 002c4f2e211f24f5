"""Whole models that draft: a draft model with KV of its own, and the target's twin on the target's KV."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvcache.tensors import KVTensors
from replicas.attention.reference import ReferenceAttention
from replicas.engine_config import Quantization
from replicas.model.native_decoder import LAYOUT, NativeDecoder
from replicas.model.runner import ModelRunner, TransformersRunner, kv_groups, probe_layers
from replicas.native.build import load_native_library
from replicas.native.isa import PLAIN
from replicas.native.packing import Element, pack, unpack
from replicas.sampling.sampler import Sampler
from replicas.sampling_params import SamplingParams
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import ScheduledChunk, StepPlan
from replicas.speculation.drafting.draft_model import MAX_TOKENS_BEHIND, DraftModelProposer
from replicas.speculation.drafting.model_rows import ModelRows, run_rows
from replicas.speculation.drafting.token_map import TokenMap
from replicas.speculation.drafting.twin import TwinProposer
from replicas.speculation.proposer import ObservedStep, Proposer
from tests.tiny_models import generated_by_transformers
from tests.unit.drafting_heads import BLOCK_SIZE, random_tensors, request_state

V, NUM_BLOCKS = 128, 60
PROMPTS = ([3, 17, 99, 4, 56, 21], [88, 5, 5, 61, 40, 77, 12, 9, 30])
SAME = TokenMap(torch.arange(V), torch.arange(V), tuple(range(V)), True)


def load(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model


def kv_of(model: PreTrainedModel, *, native: bool) -> KVTensors:
    layout = LAYOUT if native else ReferenceAttention.layout
    kv = KVTensors(
        kv_groups(probe_layers(model)), layout=layout, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    kv.fill(range(NUM_BLOCKS), float("nan"))  # KV that nobody wrote must not be read
    return kv


def runner_of(model: PreTrainedModel, kv: KVTensors, *, native: bool) -> ModelRunner:
    if native:
        return NativeDecoder(load_native_library(), model, probe_layers(model), kv)
    return TransformersRunner(model, ReferenceAttention(), kv)


class Target:
    """Verifies drafts greedily, one request after the other, and counts what was accepted."""

    def __init__(self, model: PreTrainedModel, *, native: bool = True) -> None:
        self.kv = kv_of(model, native=native)
        self._make = lambda: runner_of(model, self.kv, native=native)
        self.model = model
        self._runner: ModelRunner | None = None
        self.num_drafted = self.num_accepted = 0

    def step(self, state: RequestState, proposer: Proposer, draft_ids: Sequence[int] = (), most: int = 99) -> None:
        """Computes all known tokens and the drafts; takes at most `most` tokens of the answer, as if the others had been refused."""
        self._runner = self._runner or self._make()
        start, known = state.num_computed_tokens, len(state.token_ids)
        new_ids: list[int] = []
        for place in range(len(draft_ids) + 1):
            # Row by row: a chunk of several rows has the same bits, which other tests hold.
            token_ids = [*state.token_ids, *draft_ids][start if place == 0 else known + place - 1 : known + place]
            rows = ModelRows(token_ids=token_ids, end=known + place, block_ids=state.block_ids)
            new_ids.append(int(run_rows(self._runner, [rows], BLOCK_SIZE)[0].argmax()))
            if place == len(draft_ids) or new_ids[-1] != draft_ids[place] or place + 1 == most:
                break
        accepted = len(new_ids) - 1
        self.num_drafted += min(len(draft_ids), most - 1)
        self.num_accepted += accepted
        for token_id in new_ids:
            state.append(token_id)
        state.num_computed_tokens = known + accepted
        chunk = ScheduledChunk(
            state=state, start=start, num_tokens=known - start + len(draft_ids), is_prefill=start == 0,
            logits=range(known - 1, known + len(draft_ids)), draft_ids=tuple(draft_ids),
        )  # fmt: skip
        proposer.observe(ObservedStep(plan=StepPlan(chunks=(chunk,)), num_accepted=[accepted]))


def new_request(name: str, prompt: Sequence[int], first_block: int = 0, params: SamplingParams | None = None) -> RequestState:
    state = request_state([*prompt, 0], name, params)
    state.go_back(1)
    state.block_ids = list(range(first_block, first_block + 20))
    return state


def generate(target: Target, proposer: Proposer, states: Sequence[RequestState], num_output: int, mosts: Sequence[int] = (99,)) -> None:
    """Drafts for all requests together until each has `num_output` tokens; `mosts` bounds the accepted tokens, in turn."""
    turn = 0
    for state in states:
        target.step(state, proposer)
    while left := [state for state in states if state.num_output_tokens < num_output]:
        budgets = [min(1 + turn % 5, num_output - state.num_output_tokens) for state in left]
        for state, draft, budget in zip(left, proposer.propose(left, budgets), budgets, strict=True):
            assert len(draft.token_ids) <= budget
            target.step(state, proposer, draft.token_ids, mosts[turn % len(mosts)])
        turn += 1


def draft_proposer(
    model: PreTrainedModel, *, native: bool, tokens: TokenMap = SAME, max_positions: int | None = None
) -> DraftModelProposer:
    kv = kv_of(model, native=native)
    return DraftModelProposer(runner_of(model, kv, native=native), BLOCK_SIZE, Sampler(V), tokens, max_positions)


@pytest.mark.parametrize("native", [True, False])
def test_draft_model_that_is_the_target_has_every_draft_accepted(native: bool, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    target, proposer = Target(load(folder), native=native), draft_proposer(load(folder), native=native)
    states = [new_request(str(i), prompt, 20 * i) for i, prompt in enumerate(PROMPTS)]
    generate(target, proposer, states, 40, mosts=(99, 1, 2, 99, 3))
    expected = generated_by_transformers(folder, [list(prompt) for prompt in PROMPTS], 40)
    assert [state.token_ids[-state.num_output_tokens :][:40] for state in states] == expected
    assert target.num_accepted == target.num_drafted > 25


def test_draft_model_with_other_ids_for_the_same_tokens_drafts_as_well(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama-untied")  # 100 token ids
    permuted, order = load(folder), torch.randperm(100, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for table in (permuted.model.embed_tokens, permuted.lm_head):
            table.weight.copy_(table.weight[order.argsort()].clone())  # row order[i] is the target's row i
    tokens = TokenMap(torch.arange(100), order, tuple(order.tolist()), False)
    target = Target(load(folder))
    kv = kv_of(permuted, native=True)
    proposer = DraftModelProposer(runner_of(permuted, kv, native=True), BLOCK_SIZE, Sampler(100), tokens)
    states = [new_request(str(i), prompt, 20 * i) for i, prompt in enumerate(PROMPTS)]
    generate(target, proposer, states, 20)
    assert target.num_accepted == target.num_drafted > 15


def test_token_that_the_draft_model_lacks_is_never_drafted(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    expected = generated_by_transformers(folder, [list(PROMPTS[0])], 12)[0]
    known = [token_id for token_id in range(V) if token_id != expected[5]]
    tokens = TokenMap(torch.tensor(known), torch.tensor(known), tuple(range(V)), True)
    target, proposer = Target(load(folder)), draft_proposer(load(folder), native=True, tokens=tokens)
    state = new_request("r", PROMPTS[0])
    drafted: list[int] = []
    target.step(state, proposer)
    while state.num_output_tokens < 12:
        (draft,) = proposer.propose([state], [2])
        drafted += draft.token_ids
        target.step(state, proposer, draft.token_ids)
    assert state.token_ids[len(PROMPTS[0]) :][:12] == expected
    assert expected[5] not in drafted


def test_long_prompt_is_caught_up_after_steps_that_follow_the_first_wish_for_drafts(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    target, proposer = Target(load(folder)), draft_proposer(load(folder), native=True)
    state = new_request("r", [(7 * i + 3) % V for i in range(MAX_TOKENS_BEHIND + 20)])
    target.step(state, proposer)
    target.step(state, proposer)
    assert proposer._followers == {}, "nobody wanted drafts: nothing may be computed"
    assert proposer.propose([state], [3])[0].token_ids == ()
    target.step(state, proposer)
    (draft,) = proposer.propose([state], [3])
    target.step(state, proposer, draft.token_ids)
    assert (len(draft.token_ids), target.num_accepted) == (3, 3)


def test_shared_prefix_is_not_computed_again_and_preemption_starts_anew(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    target, proposer = Target(load(folder)), draft_proposer(load(folder), native=True)
    first = new_request("first", PROMPTS[1])
    generate(target, proposer, [first], 8)
    second = new_request("second", PROMPTS[1], 20)
    second.block_ids[:2], second.num_computed_tokens = first.block_ids[:2], 8
    target.step(second, proposer)
    (draft,) = proposer.propose([second], [3])
    assert proposer._followers[second].sequence.table[:2] == first.block_ids[:2]
    target.step(second, proposer, draft.token_ids)
    second.num_preemptions, second.num_computed_tokens, second.block_ids = 1, 0, list(range(40, 60))
    target.step(second, proposer)
    (draft,) = proposer.propose([second], [4])
    target.step(second, proposer, draft.token_ids)
    assert target.num_accepted == target.num_drafted
    assert len(draft.token_ids) == 4
    proposer.forget(second)
    assert second not in proposer._followers


def test_kv_of_accepted_drafts_stays_and_that_of_others_is_computed_again(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    target, proposer = Target(load(folder)), draft_proposer(load(folder), native=True)
    state = new_request("r", PROMPTS[0])
    target.step(state, proposer)
    for most, num_behind in ((99, 2), (1, 1), (2, 1), (4, 2)):  # behind all drafts, none, the first, all: the last draft has no KV
        (draft,) = proposer.propose([state], [3])
        target.step(state, proposer, draft.token_ids, most)
        assert proposer._follower_of(state).num_behind == num_behind


def test_drafts_kv_in_a_block_that_was_given_away_is_not_used(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    target, proposer = Target(load(folder)), draft_proposer(load(folder), native=True)
    state = new_request("r", [*PROMPTS[0], 7])  # 7 tokens: the second draft begins a block
    target.step(state, proposer)
    (draft,) = proposer.propose([state], [4])
    state.block_ids[2:] = range(40, 58)  # drafts got no room in the end; the next step's blocks are others
    target.step(state, proposer, draft.token_ids)
    (draft,) = proposer.propose([state], [4])
    target.step(state, proposer, draft.token_ids)
    assert (target.num_accepted, target.num_drafted) == (8, 8)


def test_drafts_end_where_the_draft_models_positions_do(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    target, proposer = Target(load(folder)), draft_proposer(load(folder), native=True, max_positions=10)
    state = new_request("r", PROMPTS[0])
    target.step(state, proposer)
    assert len(proposer.propose([state], [3])[0].token_ids) == 3
    assert proposer.propose([state], [4])[0].token_ids == ()


def twin_of(target: Target, sampler: Sampler | None = None) -> TwinProposer:
    twin = NativeDecoder(
        load_native_library(), target.model, probe_layers(target.model), target.kv, quantization="int8", keeps_model=True
    )  # fmt: skip
    return TwinProposer(twin, BLOCK_SIZE, sampler or Sampler(V))


def test_twin_changes_no_token_and_has_most_drafts_accepted(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    target = Target(load(folder))
    proposer = twin_of(target)
    states = [new_request(str(i), prompt, 20 * i) for i, prompt in enumerate(PROMPTS)]
    generate(target, proposer, states, 40, mosts=(99, 1, 99, 2))
    expected = generated_by_transformers(folder, [list(prompt) for prompt in PROMPTS], 40)
    assert [state.token_ids[-state.num_output_tokens :][:40] for state in states] == expected
    assert target.num_accepted > 0.8 * target.num_drafted > 20


@pytest.mark.parametrize(("output", "element"), [(None, Element.INT4), ("int8", Element.INT8)])
def test_output_layer_of_a_decoder_can_have_another_quantization(
    output: Quantization | None, element: Element, folder_of: Callable[[str], Path]
) -> None:
    model = load(folder_of("llama-untied"))
    lm_head_VH = model.lm_head.weight.detach().clone()
    decoder = NativeDecoder(
        load_native_library(variants=[PLAIN]), model, probe_layers(model), kv_of(model, native=True), quantization="int4",
        output_quantization=output,
    )  # fmt: skip
    hidden_NH = random_tensors({"hidden": (3, 32)})["hidden"]
    expected = hidden_NH @ unpack(pack(lm_head_VH, element)).T
    torch.testing.assert_close(decoder.output_logits(hidden_NH), expected, rtol=1e-4, atol=1e-4)


def test_twin_draws_at_the_targets_uniform_numbers(folder_of: Callable[[str], Path]) -> None:
    """At temperature 2 the most probable token is rarely drawn: only drafts at the same uniform numbers can be right."""
    model = load(folder_of("llama"))
    target = Target(model)
    proposer, sampler = twin_of(target), Sampler(V)
    state = new_request("r", PROMPTS[0], params=SamplingParams(temperature=2.0))
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    num_equal = 0
    target.step(state, proposer)
    for _ in range(10):
        (draft,) = proposer.propose([state], [3])
        for token_id in draft.token_ids:
            with torch.inference_mode():
                logits_1V = plain(input_ids=torch.tensor([state.token_ids])).logits[0, -1:]
            drawn = sampler.sample(logits_1V, [state.sampling]).token_ids[0]
            num_equal += drawn == token_id
            state.append(drawn)
            run_rows(
                target._runner, [ModelRows(token_ids=state.token_ids[-2:-1], end=len(state.token_ids) - 1, block_ids=state.block_ids)], 4
            )
            state.num_computed_tokens += 1
            if drawn != token_id:
                break
    assert num_equal >= 15
