"""Medusa heads: files in both layouts, the plain formula of the paper, and the drafts of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from replicas.native.build import load_native_library
from replicas.sampling.philox import uniforms
from replicas.sampling.sampler import Sampler
from replicas.sampling_params import SamplingParams
from replicas.scheduling.step_plan import HiddenStates, ScheduledChunk, StepPlan
from replicas.speculation.drafting.interest import RESTING_STEPS
from replicas.speculation.drafting.medusa import MedusaProposer
from replicas.speculation.heads.head_files import BadHead
from replicas.speculation.heads.medusa_files import read_medusa
from replicas.speculation.heads.medusa_heads import MedusaHeads
from replicas.speculation.proposer import ObservedStep
from tests.unit.drafting_heads import head_target, random_tensors, request_state, write_head

H, V, HEADS = 8, 20, 3
NUMERIC_CONFIG = {"medusa_num_heads": HEADS, "medusa_num_layers": 2, "base_model_name_or_path": "base", "version": "1"}
VLLM_CONFIG = {
    "model_type": "medusa", "hidden_size": H, "vocab_size": V, "num_heads": HEADS, "num_hidden_layers": 2, "max_paths": 64, "topk": 10,
    "truncated_vocab_size": V, "medusa_fc_bias": True,
}  # fmt: skip


def numeric_tensors(*, has_outputs: bool = True) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(HEADS):
        for layer in range(2):
            shapes |= {f"{head}.{layer}.linear.weight": (H, H), f"{head}.{layer}.linear.bias": (H,)}
        if has_outputs:
            shapes[f"{head}.2.weight"] = (V, H)
    return random_tensors(shapes)


def vllm_tensors(numeric: dict[str, Tensor], output_names: dict[str, str]) -> dict[str, Tensor]:
    """The same heads under vLLM's names; `output_names` maps those of output layers."""
    found = {}
    for name, tensor in numeric.items():
        head, rest = name.split(".", 1)
        if "linear" in rest:
            layer, _, kind = rest.split(".")
            found[f"blocks.{head}.layers.{layer}.{kind}"] = tensor
        elif name in output_names:
            found[output_names[name]] = tensor
    return found


def expected_logits(hidden_RH: Tensor, numeric: dict[str, Tensor], head: int, output_VH: Tensor) -> Tensor:
    """x + SiLU(W x + b) for each layer, then the output layer, row by row in float64."""
    x_RH = hidden_RH.double()
    for layer in range(2):
        weight, bias = (numeric[f"{head}.{layer}.linear.{kind}"].double() for kind in ("weight", "bias"))
        x_RH = x_RH + silu(torch.einsum("oh,rh->ro", weight, x_RH) + bias)
    return torch.einsum("vh,rh->rv", output_VH.double(), x_RH)


def heads_of(source: str, lm_head_VH: Tensor, library: Any = None) -> MedusaHeads:
    return MedusaHeads(read_medusa(source, hidden_size=H, vocab_size=V), head_target(lm_head_VH, library=library))


LM_HEAD = random_tensors({"lm_head": (V, H)}, seed=5)["lm_head"]
HIDDEN = random_tensors({"hidden": (4, H)}, seed=6)["hidden"]
OUTPUTS = {f"{head}.2.weight": f"lm_heads.{head}.weight" for head in range(HEADS)}


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("layout", ["safetensors", "pickle", "merged", "vllm", "vllm with its prefix"])
def test_heads_of_every_layout_with_own_outputs_give_the_papers_formula(layout: str, kernels: str, tmp_path: Path) -> None:
    numeric = numeric_tensors()
    if layout.startswith("vllm"):
        prefix = "medusa_heads." if "prefix" in layout else ""
        tensors = {prefix + name: tensor for name, tensor in vllm_tensors(numeric, OUTPUTS).items()}
        source = write_head(tmp_path, VLLM_CONFIG, tensors)
    else:
        file = "medusa_lm_head.pt" if layout == "pickle" else "medusa_lm_head.safetensors"
        prefix = "medusa_head." if layout == "merged" else ""
        source = write_head(tmp_path, NUMERIC_CONFIG, {prefix + name: tensor for name, tensor in numeric.items()}, file)
    heads = heads_of(source, LM_HEAD, load_native_library() if kernels == "native" else None)
    found = heads.logits(HIDDEN, HEADS)
    assert heads.num_heads == len(found) == HEADS
    for head, logits_RV in enumerate(found):
        expected = expected_logits(HIDDEN, numeric, head, numeric[f"{head}.2.weight"])
        torch.testing.assert_close(logits_RV.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_heads_without_output_layers_share_the_targets(kernels: str, tmp_path: Path) -> None:
    numeric = numeric_tensors(has_outputs=False)
    source = write_head(tmp_path, {**NUMERIC_CONFIG, "version": "2"}, numeric, "medusa_lm_head.safetensors")
    heads = heads_of(source, LM_HEAD, load_native_library() if kernels == "native" else None)
    for head, logits_RV in enumerate(heads.logits(HIDDEN, 2)):
        torch.testing.assert_close(logits_RV.double(), expected_logits(HIDDEN, numeric, head, LM_HEAD), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_vllm_head_with_the_original_output_layer_uses_it_for_all_heads(name: str, tmp_path: Path) -> None:
    numeric = numeric_tensors()
    tensors = vllm_tensors(numeric, {"0.2.weight": name})
    heads = heads_of(write_head(tmp_path, {**VLLM_CONFIG, "original_lm_head": True}, tensors), LM_HEAD)
    for head, logits_RV in enumerate(heads.logits(HIDDEN, HEADS)):
        expected = expected_logits(HIDDEN, numeric, head, numeric["0.2.weight"])
        torch.testing.assert_close(logits_RV.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored", ["rows of the map", "all rows", "none: the target's rows"])
def test_vllm_head_with_a_token_map_knows_the_mapped_tokens_in_ascending_order(stored: str, tmp_path: Path) -> None:
    numeric, token_map = numeric_tensors(), torch.tensor([7, 2, 19, 0, 11])
    tensors = vllm_tensors(numeric, {} if "none" in stored else OUTPUTS)
    if stored == "rows of the map":
        tensors = {name: tensor[token_map] if name.startswith("lm_heads") else tensor for name, tensor in tensors.items()}
    source = write_head(tmp_path, {**VLLM_CONFIG, "truncated_vocab_size": 5}, {**tensors, "token_map": token_map})
    heads = heads_of(source, LM_HEAD)
    assert heads.token_ids_C is not None
    assert heads.token_ids_C.tolist() == [0, 2, 7, 11, 19]
    for head, logits_RC in enumerate(heads.logits(HIDDEN, HEADS)):
        output_VH = LM_HEAD if "none" in stored else numeric[f"{head}.2.weight"]
        expected = expected_logits(HIDDEN, numeric, head, output_VH)[:, [0, 2, 7, 11, 19]]
        torch.testing.assert_close(logits_RC.double(), expected, rtol=1e-4, atol=1e-4)


def test_reader_uses_fewer_heads_than_configured_nowhere_and_more_where_stored(tmp_path: Path) -> None:
    source = write_head(tmp_path / "a", {**NUMERIC_CONFIG, "medusa_num_heads": 2}, numeric_tensors(), "medusa_lm_head.safetensors")
    assert heads_of(source, LM_HEAD).num_heads == HEADS
    source = write_head(tmp_path / "b", {**NUMERIC_CONFIG, "medusa_num_heads": 4}, numeric_tensors(), "medusa_lm_head.safetensors")
    with pytest.raises(BadHead, match="medusa_num_heads is 4, but there are tensors of only 3"):
        heads_of(source, LM_HEAD)


def _without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in numeric_tensors().items() if key != name}


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, _without("1.0.linear.bias"), r"lacks tensor 1\.0\.linear\.bias \[8\]"),
        ({}, _without("2.2.weight"), r"lacks tensor 2\.2\.weight \[20, 8\]"),
        ({}, numeric_tensors() | {"0.2.weight": torch.zeros(19, H)}, r"tensor 0\.2\.weight has shape \[19, 8\], .* needs \[20, 8\]"),
        ({}, numeric_tensors() | {"extra.weight": torch.zeros(3)}, r"tensor extra\.weight \[3\] is unknown"),
        ({}, numeric_tensors() | {"0.0.linear.bias": torch.full((H,), torch.nan)}, r"0\.0\.linear\.bias holds values that are not finite"),
        ({}, {"fc.weight": torch.zeros(2)}, "has no Medusa heads"),
        ({"medusa_num_layers": 1}, numeric_tensors(), "medusa_num_layers is 1, but head 0 has 2 layers"),
        ({"hidden_size": 16}, numeric_tensors(), "made for a hidden size of 16; the target's is 8"),
        ({"vocab_size": 21}, numeric_tensors(), "made for 21 token ids; the target has 20"),
        ({"posterior_threshold": 0.09}, numeric_tensors(), "posterior_threshold=0.09 accepts tokens that the target would not draw"),
        ({"proposal": [{"accept_tolerance": 0.1}]}, numeric_tensors(), "accept_tolerance=0.1 accepts tokens"),
    ],
)
def test_file_that_does_not_fit_is_rejected_with_one_line(
    config: dict[str, Any], tensors: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    source = write_head(tmp_path, {**NUMERIC_CONFIG, **config}, tensors, "medusa_lm_head.safetensors")
    with pytest.raises(BadHead, match=message) as raised:
        heads_of(source, LM_HEAD)
    assert "\n" not in str(raised.value)


def test_token_map_with_a_repeated_or_foreign_id_is_rejected(tmp_path: Path) -> None:
    for place, bad in enumerate(([1, 1, 2], [1, 2, V])):
        tensors = {**vllm_tensors(numeric_tensors(), {}), "token_map": torch.tensor(bad)}
        with pytest.raises(BadHead, match="token_map must hold different token ids from 0 to 19"):
            heads_of(write_head(tmp_path / str(place), {**VLLM_CONFIG, "truncated_vocab_size": 3}, tensors), LM_HEAD)


def test_folder_without_config_weights_or_tensors_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadHead, match="does not exist"):
        heads_of(str(tmp_path / "nowhere"), LM_HEAD)
    with pytest.raises(BadHead, match=r"has no config\.json"):
        heads_of(str(tmp_path), LM_HEAD)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadHead, match=r"has no weights: none of model\.safetensors"):
        heads_of(str(tmp_path), LM_HEAD)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    with pytest.raises(BadHead, match="is no readable safetensors file"):
        heads_of(str(tmp_path), LM_HEAD)


class _Mischief:
    def __reduce__(self) -> Any:
        return (print, ("code of the file runs",))


def test_pickle_that_would_run_code_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_head(tmp_path, NUMERIC_CONFIG, {"0.0.linear.weight": _Mischief()}, "medusa_lm_head.pt")  # type: ignore[dict-item]
    with pytest.raises(BadHead, match="cannot be read as tensors only"):
        heads_of(source, LM_HEAD)
    assert "runs" not in capsys.readouterr().out


# Drafts of requests


def proposer_of(tmp_path: Path) -> tuple[MedusaProposer, dict[str, Tensor]]:
    numeric = numeric_tensors()
    target = head_target(LM_HEAD)
    heads = MedusaHeads(read_medusa(write_head(tmp_path, VLLM_CONFIG, vllm_tensors(numeric, OUTPUTS)), hidden_size=H, vocab_size=V), target)
    return MedusaProposer(heads, target, Sampler(V)), numeric


def observed(plan: StepPlan, wanted: HiddenStates, rows: int) -> tuple[ObservedStep, Tensor]:
    hidden_KH = random_tensors({"h": (rows, H)}, seed=9)["h"]
    plan = StepPlan(chunks=plan.chunks, hidden=wanted)
    return ObservedStep(plan=plan, num_accepted=[0] * len(plan.chunks), hidden_LKW=hidden_KH[None]), hidden_KH


def test_drafts_are_each_heads_best_token_behind_the_row_that_drew_the_newest(tmp_path: Path) -> None:
    proposer, numeric = proposer_of(tmp_path)
    one, two = request_state([3, 1, 4, 1, 5], "one"), request_state([2, 7, 1], "two")
    prompt = request_state([9, 9, 9, 9, 9, 9], "three")
    plan = StepPlan(
        chunks=(
            ScheduledChunk(state=prompt, start=0, num_tokens=2, is_prefill=True),
            # Two drafts; the first was accepted, so 4, 1, 5 were new: 5 was drawn from position 3.
            ScheduledChunk(state=one, start=1, num_tokens=4, is_prefill=False, logits=range(2, 5), draft_ids=(1, 8)),
            ScheduledChunk(state=two, start=1, num_tokens=1, is_prefill=False, logits=range(1, 2)),
        )
    )
    wanted = proposer.wants_hidden(plan)
    assert wanted == HiddenStates(layers=(4,), positions=(range(0), range(2, 5), range(1, 2)))
    step, hidden_KH = observed(plan, wanted, rows=4)
    proposer.observe(step)
    drafts = proposer.propose([one, two, prompt], [2, 5, 3])
    expected_one, expected_two = (
        [int(expected_logits(hidden_KH[row : row + 1], numeric, head, numeric[f"{head}.2.weight"]).argmax()) for head in range(HEADS)]
        for row in (1, 3)
    )
    assert [list(draft.token_ids) for draft in drafts] == [expected_one[:2], expected_two, []]
    assert (one.token_ids, two.token_ids) == ([3, 1, 4, 1, 5], [2, 7, 1])
    one.append(8)  # a token that no observed row drew
    assert proposer.propose([one], [2])[0].token_ids == ()
    proposer.forget(two)
    assert proposer.propose([two], [2])[0].token_ids == ()


def test_sampled_request_gets_the_tokens_at_its_own_uniform_numbers(tmp_path: Path) -> None:
    proposer, numeric = proposer_of(tmp_path)
    state = request_state([3, 1, 4], params=SamplingParams(temperature=1.0), seed=77)
    plan = StepPlan(chunks=(ScheduledChunk(state=state, start=1, num_tokens=1, is_prefill=False, logits=range(1, 2)),))
    wanted = proposer.wants_hidden(plan)
    assert wanted is not None
    step, hidden_KH = observed(plan, wanted, rows=1)
    proposer.observe(step)
    (draft,) = proposer.propose([state], [3])
    assert len(draft.token_ids) == HEADS
    for head, token_id in enumerate(draft.token_ids):
        uniform = float(uniforms([77], [0], [1 + head])[0])
        cdf_V = expected_logits(hidden_KH, numeric, head, numeric[f"{head}.2.weight"])[0].softmax(-1).cumsum(-1)
        assert token_id == int((cdf_V <= uniform).sum())


def test_step_without_a_sampling_chunk_wants_no_hidden_states(tmp_path: Path) -> None:
    proposer, _ = proposer_of(tmp_path)
    state = request_state([3, 1, 4, 1, 5])
    assert proposer.wants_hidden(StepPlan(chunks=(ScheduledChunk(state=state, start=0, num_tokens=2, is_prefill=True),))) is None


def test_steps_keep_nothing_once_drafts_have_not_been_wanted_for_long(tmp_path: Path) -> None:
    proposer, _ = proposer_of(tmp_path)
    state = request_state([3, 1, 4])
    plan = StepPlan(chunks=(ScheduledChunk(state=state, start=1, num_tokens=1, is_prefill=False, logits=range(1, 2)),))
    assert all(proposer.wants_hidden(plan) is not None for _ in range(RESTING_STEPS))
    assert proposer.wants_hidden(plan) is None
    assert proposer.propose([state], [1])[0].token_ids == ()
    assert proposer.wants_hidden(plan) is not None
