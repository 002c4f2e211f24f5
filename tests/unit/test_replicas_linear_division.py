"""Parts of linears in formats whose tensors hold several outputs or inputs in one place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Linear
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.pytorch_utils import Conv1D

from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.linear.division import Indivisible, LinearPart, ParameterSlice, divide, unit
from replicas.linear.formats import FORMATS
from replicas.linear.method import Axis, LinearMethod, StoredTensor
from replicas.linear.modules import StoredLinear
from replicas.sampling_params import SamplingParams
from replicas.sharding.partition import partition
from replicas.sharding.sharding import ShardingPlan
from tests.engine_harness import requests_for, run
from tests.rank_threads import ThreadLauncher
from tests.tiny_models import SIZES, generated_by_transformers, tiny_prompts

GROUP = 32


@dataclass(frozen=True)
class WordCodes(LinearMethod):
    """int4 codes as GPTQ lays them out: eight inputs in a word, eight zeros in a word, groups of 32 inputs. With `is_act_order` each
    input names its group, and every rank needs all scales."""

    is_act_order: bool = False

    def tensors(self, num_outputs: int, num_inputs: int) -> tuple[StoredTensor, ...]:
        groups = None if self.is_act_order else Axis(dim=0, unit=GROUP)
        num_groups = None if self.is_act_order else -(-num_inputs // GROUP)
        scales = None if num_groups is None else (num_groups, num_outputs)
        zeros = None if num_groups is None else (num_groups, num_outputs // 8)
        found = (
            StoredTensor(
                name="qweight",
                shape=(num_inputs // 8, num_outputs),
                dtype=torch.int32,
                outputs=Axis(dim=1),
                inputs=Axis(dim=0, unit=8),
            ),
            StoredTensor(name="qzeros", shape=zeros, dtype=torch.int32, outputs=Axis(dim=1, unit=8), inputs=groups),
            StoredTensor(name="scales", shape=scales, dtype=torch.float32, outputs=Axis(dim=1), inputs=groups),
        )
        if not self.is_act_order:
            return found
        return (*found, StoredTensor(name="g_idx", shape=(num_inputs,), dtype=torch.int32, inputs=Axis(dim=0)))

    def weight(self, stored: Mapping[str, Tensor]) -> Tensor:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        q_KN = ((stored["qweight"][:, None] >> shifts[:, None]) & 15).flatten(0, 1)
        z_GN = ((stored["qzeros"][:, :, None] >> shifts) & 15).flatten(1)
        group_K = stored["g_idx"].long() if self.is_act_order else torch.arange(q_KN.shape[0]) // GROUP
        return ((q_KN - z_GN[group_K]) * stored["scales"][group_K]).T


def _words(codes: Tensor, dim: int) -> Tensor:
    """Eight neighbours along `dim` in one int32, the first in the lowest bits."""
    eights = codes.unflatten(dim, (-1, 8)).long()
    shifts = torch.arange(0, 32, 4).view(*[8 if i == dim + 1 else 1 for i in range(eights.dim())])
    return (eights << shifts).sum(dim + 1).to(torch.int32)


def _part(side: Any, *ranges: range, has_bias: bool = True) -> LinearPart:
    return LinearPart(side=side, ranges=ranges, has_bias=has_bias)


def test_dense_linear_is_divided_along_its_own_dims_and_counts_a_bias_once() -> None:
    linear = Linear(6, 10)
    assert divide(linear, _part("outputs", range(2, 4), range(8, 10))) == {
        "weight": ParameterSlice(dim=0, ranges=(range(2, 4), range(8, 10))),
        "bias": ParameterSlice(dim=0, ranges=(range(2, 4), range(8, 10))),
    }
    inputs = {"weight": ParameterSlice(dim=1, ranges=(range(3, 6),))}
    assert divide(linear, _part("inputs", range(3, 6))) == inputs
    assert divide(linear, _part("inputs", range(3, 6), has_bias=False)) == {**inputs, "bias": ParameterSlice(dim=0, ranges=())}
    assert divide(Conv1D(10, 6), _part("inputs", range(3, 6)))["weight"] == ParameterSlice(dim=0, ranges=(range(3, 6),))


def test_word_codes_are_divided_in_words_zeros_and_groups() -> None:
    stored = StoredLinear(WordCodes(), Linear(128, 48, bias=False))
    assert divide(stored, _part("outputs", range(16, 32))) == {
        "qweight": ParameterSlice(dim=1, ranges=(range(16, 32),)),
        "qzeros": ParameterSlice(dim=1, ranges=(range(2, 4),)),
        "scales": ParameterSlice(dim=1, ranges=(range(16, 32),)),
    }
    assert divide(stored, _part("inputs", range(32, 96))) == {
        "qweight": ParameterSlice(dim=0, ranges=(range(4, 12),)),
        "qzeros": ParameterSlice(dim=0, ranges=(range(1, 3),)),
        "scales": ParameterSlice(dim=0, ranges=(range(1, 3),)),
    }
    assert (unit([stored], "outputs"), unit([stored, Linear(3, 3)], "inputs")) == (8, 32)


def test_act_order_keeps_every_scale_on_every_rank_and_divides_in_words() -> None:
    stored = StoredLinear(WordCodes(is_act_order=True), Linear(128, 48, bias=False))
    assert divide(stored, _part("inputs", range(8, 40))) == {
        "qweight": ParameterSlice(dim=0, ranges=(range(1, 5),)),
        "g_idx": ParameterSlice(dim=0, ranges=(range(8, 40),)),
    }


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (_part("outputs", range(4)), "outputs 0 to 4 do not fall on units of 8"),
        (_part("inputs", range(8, 128)), "inputs 8 to 128 do not fall on units of 32"),
    ],
)
def test_part_that_ends_within_a_unit_is_refused(part: LinearPart, message: str) -> None:
    with pytest.raises(Indivisible, match=message):
        divide(StoredLinear(WordCodes(), Linear(128, 48)), part)


def test_last_unit_may_be_short() -> None:
    @dataclass(frozen=True)
    class Blocks(LinearMethod):
        def tensors(self, num_outputs: int, num_inputs: int) -> tuple[StoredTensor, ...]:
            return (StoredTensor(name="scales", shape=(-(-num_outputs // 128),), outputs=Axis(dim=0, unit=128)),)

        def weight(self, stored: Mapping[str, Tensor]) -> Tensor:
            raise NotImplementedError

    stored = StoredLinear(Blocks(), Linear(1, 300, bias=False))
    assert divide(stored, _part("outputs", range(256, 300)))["scales"].ranges == (range(2, 3),)


def test_width_counts_the_places_that_a_unit_takes() -> None:
    """32 codes of 3 bits in three words."""

    @dataclass(frozen=True)
    class ThreeBits(LinearMethod):
        def tensors(self, num_outputs: int, num_inputs: int) -> tuple[StoredTensor, ...]:
            shape = (num_inputs // 32 * 3, num_outputs)
            return (StoredTensor(name="qweight", shape=shape, inputs=Axis(dim=0, unit=32, width=3)),)

        def weight(self, stored: Mapping[str, Tensor]) -> Tensor:
            raise NotImplementedError

    stored = StoredLinear(ThreeBits(), Linear(128, 4, bias=False))
    assert divide(stored, _part("inputs", range(32, 128))) == {"qweight": ParameterSlice(dim=0, ranges=(range(3, 12),))}


SHAPE = LlamaConfig(**{**SIZES, "intermediate_size": 128})


def _meta_model() -> Any:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SHAPE)
    for name, module in list(model.model.named_modules(prefix="model")):
        if isinstance(module, Linear):
            model.set_submodule(name, StoredLinear(WordCodes(), module))
    return model


def test_plan_divides_columns_in_whole_groups() -> None:
    """At two, both ranks have the same heads. At three the columns alone would do: 4 groups for 3 ranks."""
    plan = ShardingPlan.of(_meta_model(), 2)
    assert [share.columns for share in plan.shares] == [range(64), range(64, 128)]
    assert (plan.shape.column_unit, plan.shape.token_unit) == (32, 1)
    assert all(share.columns.start % 32 == 0 for share in partition(plan.shape, 3))


def test_size_that_splits_a_group_is_refused_with_the_layer_and_the_sizes_that_work() -> None:
    message = (
        r"tensor_parallel_size 3 cannot divide model\.layers\.0\.self_attn\.o_proj, whose inputs .* units of 32; sizes that work: 1, 2"
    )
    with pytest.raises(ValueError, match=message):
        ShardingPlan.of(_meta_model(), 3)


@pytest.mark.usefixtures("same_torch_threads")
@pytest.mark.parametrize("is_act_order", [False, True])
def test_word_codes_at_two_ranks_equal_the_floats_they_stand_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_act_order: bool
) -> None:
    method = WordCodes(is_act_order)
    monkeypatch.setitem(FORMATS, "words", lambda config: lambda name, has: method if has("qweight") else None)
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(SHAPE)
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    for name, module in model.model.named_modules(prefix="model"):
        if isinstance(module, Linear):
            num_groups = module.in_features // GROUP
            q_KN = torch.randint(0, 16, (module.in_features, module.out_features), generator=generator)
            z_GN = torch.randint(5, 11, (num_groups, module.out_features), generator=generator)
            s_GN = torch.rand(num_groups, module.out_features, generator=generator) * 0.05
            group_K = torch.arange(module.in_features) // GROUP
            if is_act_order:
                group_K = group_K[torch.randperm(module.in_features, generator=generator)]
                tensors[f"{name}.g_idx"] = group_K.to(torch.int32)
            module.weight.data = ((q_KN - z_GN[group_K]) * s_GN[group_K]).T.contiguous()
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.qweight": _words(q_KN, 0), f"{name}.qzeros": _words(z_GN, 1), f"{name}.scales": s_GN}
    model.save_pretrained(tmp_path / "plain")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "words"}}))
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine = load_engine(
        EngineConfig(model=str(tmp_path), dtype="float32", kv_cache_bytes=1 << 20, num_threads=1, tensor_parallel_size=2),
        launcher=ThreadLauncher(),
    )
    try:
        assert engine.description.runner == "native"
        answers = run(engine, requests_for(tiny_prompts(), greedy))
    finally:
        engine.close()
    assert [one.token_ids for one in answers] == generated_by_transformers(tmp_path / "plain", tiny_prompts(), 12)
