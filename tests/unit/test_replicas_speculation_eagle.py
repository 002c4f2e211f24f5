"""EAGLE heads: every layout against a plain reference, over chunked prompts, refused drafts, shared blocks and gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache.tensors import KVTensors
from replicas.attention.backend import AttentionBackend
from replicas.attention.native import NativeAttention
from replicas.attention.reference import ReferenceAttention
from replicas.native.build import load_native_library
from replicas.sampling.sampler import Sampler
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import HiddenStates, ScheduledChunk, StepPlan
from replicas.speculation.drafting.eagle import EagleProposer
from replicas.speculation.drafting.interest import RESTING_STEPS
from replicas.speculation.heads.eagle_files import read_eagle
from replicas.speculation.heads.eagle_layer import EagleLayer, kv_group
from replicas.speculation.heads.head_files import BadHead
from replicas.speculation.proposer import ObservedStep
from tests.unit.drafting_heads import BLOCK_SIZE, head_target, random_tensors, request_state, write_head
from tests.unit.eagle_heads import EAGLE1, EAGLE3, IDS, LAYER, LAYERS, V, W, eagle1_tensors, eagle3_tensors, speculators_config
from tests.unit.eagle_reference import EagleReference

LM_HEAD, EMBEDDING = (random_tensors({"t": (V, W)}, seed=seed)["t"] for seed in (21, 22))
PROMPT = [5, 17, 2, 38, 9, 11, 30, 4, 26, 1]
HIDDEN = random_tensors({"hidden": (LAYERS + 1, 60, W)}, seed=23)["hidden"]
"""The target's hidden states of each layer and position, whatever the tokens are."""


class Target:
    """Plays the target's part: plans chunks, gives hidden states, appends the tokens that it is told."""

    def __init__(self, source: str, *, kernels: str = "torch", num_blocks: int = 24) -> None:
        library = load_native_library() if kernels == "native" else None
        target = head_target(LM_HEAD, EMBEDDING, num_layers=LAYERS, library=library)
        self.layer = EagleLayer(read_eagle(source, hidden_size=W, vocab_size=V, num_layers=LAYERS), target)
        backend: AttentionBackend = ReferenceAttention() if library is None else NativeAttention(library)
        self.kv = KVTensors(
            [kv_group(self.layer.settings)], layout=backend.layout, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32,
            device=torch.device("cpu"),
        )  # fmt: skip
        self.kv.fill(range(num_blocks), float("nan"))  # an entry that nobody wrote must not be read
        self.proposer = EagleProposer(self.layer, self.kv, backend, Sampler(V))

    def step(self, *chunks: ScheduledChunk, new_ids: Sequence[Sequence[int]] = (), hidden: Tensor = HIDDEN) -> None:
        """Runs the chunks; `new_ids` are the tokens that those which sample get, in order."""
        plan = StepPlan(chunks=chunks)
        wanted = self.proposer.wants_hidden(plan)
        assert wanted is not None
        rows = [hidden[list(wanted.layers)][:, span.start : span.stop] for span in wanted.positions]
        results = iter(new_ids)
        for chunk in chunks:
            if chunk.samples:
                for token_id in next(results):
                    chunk.state.append(token_id)
        plan = StepPlan(chunks=chunks, hidden=wanted)
        self.proposer.observe(ObservedStep(plan=plan, num_accepted=[0] * len(chunks), hidden_LKW=torch.cat(rows, 1)))

    def drafts(self, *states: RequestState, budget: int = 4) -> list[list[int]]:
        return [list(draft.token_ids) for draft in self.proposer.propose(states, [budget] * len(states))]


def new_request(name: str = "r", first_block: int = 0, prompt: list[int] = PROMPT) -> RequestState:
    state = request_state([*prompt, 7], name)
    state.go_back(1)  # the step that computes the prompt draws its first token
    state.block_ids = list(range(first_block, first_block + 10))
    return state


def prompt_chunk(state: RequestState, start: int, end: int) -> ScheduledChunk:
    logits = range(end - 1, end) if end == len(state.request.prompt_ids) else range(0)
    return ScheduledChunk(state=state, start=start, num_tokens=end - start, is_prefill=True, logits=logits)


def decode_chunk(state: RequestState, drafts: Sequence[int] = ()) -> ScheduledChunk:
    start = len(state.token_ids) - 1
    span = range(start, start + 1 + len(drafts))
    return ScheduledChunk(state=state, start=start, num_tokens=len(span), is_prefill=False, logits=span, draft_ids=tuple(drafts))


def expected_drafts(reference: EagleReference, state: RequestState, layers: Sequence[int], num_drafts: int = 4) -> list[int]:
    known = state.token_ids
    return reference.drafts(known, HIDDEN[list(layers), : len(known) - 1], num_drafts)


def _qk_norms() -> dict[str, Tensor]:
    return random_tensors({f"layers.0.self_attn.{name}_norm.weight": (8,) for name in "qk"}, seed=31)


SPECFORGE = {**EAGLE3, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True}}
HEADS: dict[str, tuple[dict[str, Any], dict[str, Tensor], str, tuple[int, ...]]] = {
    "eagle1": (EAGLE1, eagle1_tensors(), "pytorch_model.bin", (LAYERS,)),
    "eagle1 without fc.bias": ({**EAGLE1, "bias": None}, eagle1_tensors(has_bias=False), "model.safetensors", (LAYERS,)),
    "eagle3 of its authors": (EAGLE3, eagle3_tensors(), "pytorch_model.bin", (2, 3, 3)),
    "specforge": (SPECFORGE, eagle3_tensors(has_embedding=True), "model.safetensors", (1, 2, 4)),
    "speculators": (speculators_config(), eagle3_tensors("layers.0"), "model.safetensors", (1, 3, 5)),
    "norm_before_residual": (speculators_config(norm_before_residual=True), eagle3_tensors("layers.0"), "model.safetensors", (1, 3, 5)),
    "norm_output": (speculators_config(norm_output=True), eagle3_tensors("layers.0"), "model.safetensors", (1, 3, 5)),
    "norm_before_fc": (
        speculators_config(norm_before_fc=True), eagle3_tensors("layers.0") | random_tensors({"input_norm.weight": (3 * W,)}, seed=32),
        "model.safetensors", (1, 3, 5),
    ),
    "fc_norm": (
        speculators_config(fc_norm=True, eagle_aux_hidden_state_layer_ids=[0, 6]),
        eagle3_tensors("layers.0", num_states=2) | random_tensors({f"fc_norm.{i}.weight": (W,) for i in range(2)}, seed=33),
        "model.safetensors", (0, 6),
    ),
    "qwen3": (speculators_config(), eagle3_tensors("layers.0") | _qk_norms(), "model.safetensors", (1, 3, 5)),
    "attention_bias": (
        {**EAGLE3, "attention_bias": True},
        eagle3_tensors() | random_tensors({f"midlayer.self_attn.{n}_proj.bias": (s,) for n, s in zip("qkv", (32, 16, 16), strict=True)}),
        "model.safetensors", (2, 3, 3),
    ),
    "another hidden size": (
        {**EAGLE3, "hidden_size": 24, "target_hidden_size": W}, eagle3_tensors(size=24, has_embedding=True), "model.safetensors", (2, 3, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("layout", HEADS)
def test_drafts_of_every_layout_are_those_of_the_plain_reference(layout: str, kernels: str, tmp_path: Path) -> None:
    config, tensors, file, layers = HEADS[layout]
    target = Target(write_head(tmp_path, config, tensors, file), kernels=kernels)
    reference = EagleReference(tensors, {**LAYER, **config}, EMBEDDING, LM_HEAD)
    assert target.layer.settings.layer_ids == layers
    one, two = new_request("one"), new_request("two", 10, PROMPT[3:8])
    target.step(prompt_chunk(one, 0, 3), prompt_chunk(two, 0, 5), new_ids=[[33]])
    target.step(prompt_chunk(one, 3, 10), decode_chunk(two), new_ids=[[20], [9]])
    seen: set[int] = set()
    for _ in range(3):
        found = target.drafts(one, two)
        seen.update(*found)
        assert found == [expected_drafts(reference, state, layers) for state in (one, two)]
        # Of one's drafts the first is accepted, of two's none.
        target.step(decode_chunk(one, found[0][:3]), decode_chunk(two, found[1][:1]), new_ids=[[found[0][0], 12], [6]])
    assert len(seen) > 2, "the reference drafts too few tokens to tell anything apart"


def test_head_without_an_own_output_layer_takes_the_targets_rows(tmp_path: Path) -> None:
    tensors = eagle3_tensors()
    del tensors["lm_head.weight"]
    target = Target(write_head(tmp_path, EAGLE3, tensors))
    reference = EagleReference({**tensors, "lm_head.weight": LM_HEAD[list(IDS)]}, EAGLE3, EMBEDDING, LM_HEAD)
    state = new_request()
    target.step(prompt_chunk(state, 0, 10), new_ids=[[20]])
    assert target.drafts(state) == [expected_drafts(reference, state, (2, 3, 3))]


def test_token_map_that_does_not_ascend_gives_the_same_drafts(tmp_path: Path) -> None:
    order = torch.tensor([5, 0, 11, 2, 7, 1, 9, 3, 4, 10, 6, 8])
    ascending = eagle3_tensors()
    shuffled = {**ascending, "lm_head.weight": ascending["lm_head.weight"][order]}
    shuffled["d2t"] = torch.tensor(IDS)[order] - torch.arange(12)
    state, other = new_request(), new_request()
    found = []
    for place, (tensors, one) in enumerate(((ascending, state), (shuffled, other))):
        target = Target(write_head(tmp_path / str(place), EAGLE3, tensors))
        target.step(prompt_chunk(one, 0, 10), new_ids=[[20]])
        found.append(target.drafts(one))
    assert found[0] == found[1]


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return Target(write_head(tmp_path, EAGLE3, eagle3_tensors()))


@pytest.fixture
def reference() -> EagleReference:
    return EagleReference(eagle3_tensors(), EAGLE3, EMBEDDING, LM_HEAD)


def test_shared_blocks_are_used_as_the_first_request_left_them(target: Target, reference: EagleReference) -> None:
    one = new_request("one")
    target.step(prompt_chunk(one, 0, 10), new_ids=[[20]])
    two = new_request("two", 10)
    two.block_ids[:2] = one.block_ids[:2]
    target.step(prompt_chunk(two, 8, 10), new_ids=[[20]])
    assert target.drafts(two) == [expected_drafts(reference, two, (2, 3, 3))]


def test_request_in_the_same_step_finds_the_blocks_that_the_step_fills(target: Target, reference: EagleReference) -> None:
    one, two = new_request("one"), new_request("two", 10)
    two.block_ids[:2] = one.block_ids[:2]
    target.step(prompt_chunk(one, 0, 10), prompt_chunk(two, 8, 10), new_ids=[[20], [20]])
    assert target.drafts(one, two) == [expected_drafts(reference, state, (2, 3, 3)) for state in (one, two)]


def test_shared_block_that_the_head_never_filled_is_left_out(target: Target, reference: EagleReference) -> None:
    state = new_request()
    target.step(prompt_chunk(state, 8, 10), new_ids=[[20]])  # positions 0 to 7 came from elsewhere
    found = target.drafts(state)[0]
    states = reference.fused(HIDDEN[[2, 3, 3], :10])
    followers = [*PROMPT[1:], 20]
    expected = IDS[int(reference.logits(reference.outputs(followers, states, first=8)[-1:])[0].argmax())]
    assert found[0] == expected
    whole = new_request("whole", 10)
    target.step(prompt_chunk(whole, 0, 10), new_ids=[[20]])
    assert target.drafts(whole) == [expected_drafts(reference, whole, (2, 3, 3))]


def test_blocks_that_were_given_to_others_are_not_taken_for_the_old_content(target: Target) -> None:
    one = new_request("one")
    target.step(prompt_chunk(one, 0, 10), new_ids=[[20]])
    other = new_request("other", 0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    target.step(prompt_chunk(other, 0, 9), new_ids=[[20]])
    again = new_request("again")
    target.step(prompt_chunk(again, 8, 10), new_ids=[[20]])
    assert target.proposer._features[again].sequence.num_entries == 2


def test_gap_in_the_hidden_states_ends_at_the_next_block(target: Target) -> None:
    state = new_request()
    target.step(prompt_chunk(state, 0, 10), new_ids=[[20]])
    state.append(3)  # a step without hidden states: that of position 10 is lost
    target.step(decode_chunk(state), new_ids=[[8]])
    assert target.drafts(state) == [[]]
    target.step(decode_chunk(state), new_ids=[[8]])
    drafts = target.drafts(state)[0]
    assert len(drafts) == 4
    sequence = target.proposer._features[state].sequence
    assert (sequence.num_entries, sequence.next_position) == (9, 13)  # two whole blocks, and position 12


def test_preempted_request_is_computed_again(target: Target, reference: EagleReference) -> None:
    state = new_request()
    target.step(prompt_chunk(state, 0, 10), new_ids=[[20]])
    target.step(decode_chunk(state), new_ids=[[4]])  # its row is pending
    state.num_preemptions, state.block_ids = 1, []
    assert target.drafts(state) == [[]]
    state.block_ids = list(range(10, 20))
    whole = ScheduledChunk(state=state, start=0, num_tokens=12, is_prefill=True, logits=range(11, 12))
    target.step(whole, new_ids=[[21]])
    assert target.drafts(state) == [expected_drafts(reference, state, (2, 3, 3))]


def test_rows_of_decodes_wait_until_a_draft_wants_them_or_there_are_many(target: Target, reference: EagleReference) -> None:
    state = new_request()
    target.step(prompt_chunk(state, 0, 10), new_ids=[[20]])
    for _ in range(20):
        target.step(decode_chunk(state), new_ids=[[4]])
    assert len(target.proposer._features[state].pending) == 20
    assert target.drafts(state) == [expected_drafts(reference, state, (2, 3, 3))]
    target.proposer.forget(state)
    assert target.drafts(state) == [[]]


def test_step_wants_every_position_of_every_chunk_whose_request_wants_drafts(target: Target) -> None:
    one, two = new_request("one"), new_request("two", 10)
    two.append(20)
    plan = StepPlan(chunks=(prompt_chunk(one, 0, 3), decode_chunk(two, [1, 2])))
    assert target.proposer.wants_hidden(plan) == HiddenStates(layers=(2, 3, 3), positions=(range(3), range(10, 13)))
    one.request = replace(one.request, speculates=False)
    assert target.proposer.wants_hidden(plan) == HiddenStates(layers=(2, 3, 3), positions=(range(0), range(10, 13)))
    assert target.proposer.wants_hidden(StepPlan(chunks=(prompt_chunk(one, 0, 3),))) is None


def test_request_for_which_no_drafts_are_wanted_is_left_out_until_they_are(target: Target, reference: EagleReference) -> None:
    state, other = new_request(), new_request("other", 10)
    target.step(prompt_chunk(state, 0, 10), prompt_chunk(other, 0, 10), new_ids=[[20], [20]])
    for _ in range(RESTING_STEPS):
        state.append(3)
    plan = StepPlan(chunks=(decode_chunk(state), decode_chunk(other)))
    target.drafts(other)
    assert target.proposer.wants_hidden(plan) == HiddenStates(layers=(2, 3, 3), positions=(range(74, 75), range(10, 11)))
    state.append(3)
    plan = StepPlan(chunks=(decode_chunk(state), decode_chunk(other)))
    assert target.proposer.wants_hidden(plan) == HiddenStates(layers=(2, 3, 3), positions=(range(0), range(10, 11)))
    assert target.drafts(state) == [[]]
    assert target.proposer.wants_hidden(plan) == HiddenStates(layers=(2, 3, 3), positions=(range(75, 76), range(10, 11)))


def test_steps_keep_nothing_once_drafts_have_not_been_wanted_for_long(target: Target) -> None:
    plan = StepPlan(chunks=(prompt_chunk(new_request(), 0, 3),))
    assert all(target.proposer.wants_hidden(plan) is not None for _ in range(RESTING_STEPS))
    assert target.proposer.wants_hidden(plan) is None
    target.drafts(new_request("other", 10))
    assert target.proposer.wants_hidden(plan) is not None


def _without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (EAGLE1, eagle1_tensors(has_bias=False), r"lacks tensor fc\.bias \[16\]"),
        (EAGLE1, eagle1_tensors() | {"norm.weight": torch.ones(W)}, r"tensor norm\.weight \[16\] is unknown in this layout"),
        ({**EAGLE1, "hidden_size": 24}, eagle1_tensors(), "has hidden_size 24; an EAGLE-1 head has the target's, 16|shape"),
        (EAGLE3, _without(eagle3_tensors(), "norm.weight"), r"lacks tensor norm\.weight \[16\]"),
        (EAGLE3, _without(eagle3_tensors(), "d2t"), r"lacks tensor d2t \[12\]"),
        (EAGLE3, eagle3_tensors() | {"fc.weight": torch.zeros(W, 2 * W)}, r"fc\.weight has shape \[16, 32\], .* needs \[16, 48\]"),
        (EAGLE3, eagle3_tensors() | {"d2t": torch.zeros(12, dtype=torch.int64) + 30}, "d2t must give different token ids from 0 to 39"),
        (EAGLE3, eagle3_tensors() | {"t2d": torch.zeros(V, dtype=torch.bool)}, "d2t and t2d name different token ids"),
        (EAGLE3 | {"hidden_size": 24}, eagle3_tensors(size=24), r"lacks tensor embed_tokens\.weight; its hidden size is 24"),
        (EAGLE3 | {"vocab_size": 41}, eagle3_tensors(), "made for a target with vocab_size 41; this one has 40"),
        (EAGLE3 | {"target_hidden_size": 32}, eagle3_tensors(), "made for a target with hidden_size 32; this one has 16"),
        (EAGLE3 | {"num_hidden_layers": 2}, eagle3_tensors(), "has 2 layers; EAGLE heads of one layer are served"),
        (EAGLE3 | {"hidden_act": "gelu"}, eagle3_tensors(), "hidden_act 'gelu'; only 'silu' is served"),
        (EAGLE3 | {"rope_scaling": {"type": "dynamic"}}, eagle3_tensors(), "rope of type 'dynamic'"),
        (EAGLE3 | {"num_attention_heads": 0}, eagle3_tensors(), "num_attention_heads 0, where a whole number above 0 is needed"),
        (EAGLE3 | {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, eagle3_tensors(), r"reads the hidden states \[1, 3, 7\]; .* 0 to 6"),
        (EAGLE3 | {"eagle_config": {"use_aux_hidden_state": False}}, eagle3_tensors(), "use_aux_hidden_state false"),
        (speculators_config(speculators_model_type="peagle"), eagle3_tensors("layers.0"), "speculators_model_type 'peagle'"),
        (speculators_config(norm_before_fc=True, fc_norm=True), eagle3_tensors("layers.0"), "norm_before_fc and fc_norm exclude"),
        (
            speculators_config(speculators_config={"proposal_methods": [{"accept_tolerance": 0.2}]}), eagle3_tensors("layers.0"),
            "accept_tolerance=0.2 accepts tokens that the target would not draw",
        ),
        (
            speculators_config(speculators_config={"proposal_methods": [{"verifier_accept_k": 2}]}), eagle3_tensors("layers.0"),
            "verifier_accept_k=2 accepts tokens",
        ),
    ],
)  # fmt: skip
def test_file_that_does_not_fit_is_rejected_with_one_line(
    config: dict[str, Any], tensors: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadHead, match=message) as raised:
        read_eagle(write_head(tmp_path, config, tensors), hidden_size=W, vocab_size=V, num_layers=LAYERS)
    assert "\n" not in str(raised.value)
