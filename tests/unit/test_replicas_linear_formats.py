"""A format of linears that no other module knows: one class and one line in FORMATS make it load, run and divide."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig, ParallelConfig
from replicas.linear.formats import FORMATS
from replicas.linear.method import Axis, LinearMethod, StoredTensor
from replicas.model_support import UnsupportedModel
from replicas.native.packing import Element, PackedLinear, pack_codes, unpack
from replicas.sampling_params import SamplingParams
from tests.engine_harness import requests_for, run
from tests.rank_threads import ThreadLauncher
from tests.tiny_models import SIZES, generated_by_transformers, save_tiny_model, tiny_prompts

NUM_OUTPUT = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=5)
NAME = "row-int8"

pytestmark = pytest.mark.usefixtures("same_torch_threads")


@dataclass(frozen=True)
class RowInt8(LinearMethod):
    """int8 codes times one scale a row."""

    def tensors(self, num_outputs: int, num_inputs: int) -> tuple[StoredTensor, ...]:
        return (
            StoredTensor(name="codes", shape=(num_outputs, num_inputs), dtype=torch.int8, outputs=Axis(dim=0), inputs=Axis(dim=1)),
            StoredTensor(name="codes.scale", shape=(num_outputs, 1), dtype=torch.float32, outputs=Axis(dim=0)),
            StoredTensor(name="version", shape=None, dtype=torch.int64),
        )

    def weight(self, stored: Mapping[str, Tensor]) -> Tensor:
        assert stored["version"].tolist() == [1, 2, 3], "a tensor whose shape only the checkpoint knows"
        return stored["codes"].float() * stored["codes.scale"]


@dataclass(frozen=True)
class PackedRowInt8(RowInt8):
    """The same, its codes given to the native kernels as they are."""

    def pack(self, name: str, parts: Sequence[Mapping[str, Tensor]], dtype: torch.dtype) -> PackedLinear:
        u_NK = torch.cat([(part["codes"].int() + 128).to(torch.uint8) for part in parts])
        units_N = torch.cat([part["codes.scale"][:, 0] for part in parts])
        one_NG = torch.ones(u_NK.shape[0], -(-u_NK.shape[1] // 32))
        return pack_codes(u_NK, one_NG, -128 * one_NG, units_N, Element.INT8)


def _format(method: LinearMethod, config: Mapping[str, Any]) -> Any:
    def stored(name: str, has: Callable[[str], bool]) -> LinearMethod | None:
        return method if has("codes") and name not in config.get("ignore", ()) else None

    return stored


@dataclass(frozen=True)
class Saved:
    folder: Path
    """The checkpoint in the format."""
    plain: Path
    """The floats that it stands for."""


def _saved(name: str, folder: Path, **quantization_config: Any) -> Saved:
    """A tiny model of which every linear of the layers but those in `dense` is stored as codes."""
    dense = quantization_config.pop("dense", ())
    saved = Saved(folder=folder / "codes", plain=save_tiny_model(name, folder / "plain"))
    model = AutoModelForCausalLM.from_pretrained(saved.plain)
    tensors = {key: value.clone() for key, value in model.state_dict().items() if key != "lm_head.weight"}
    for module_name, module in model.model.named_modules(prefix="model"):
        if isinstance(module, torch.nn.Linear) and not module_name.endswith(tuple(dense)):
            weight = tensors.pop(f"{module_name}.weight")
            scale = weight.abs().amax(1, keepdim=True) / 127
            codes = (weight / scale).round()
            module.weight.data = codes * scale
            tensors |= {
                f"{module_name}.codes": codes.to(torch.int8),
                f"{module_name}.codes.scale": scale,
                f"{module_name}.version": torch.tensor([1, 2, 3]),
            }
    if not model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = model.lm_head.weight.detach().clone()
    model.save_pretrained(saved.plain)
    saved.folder.mkdir()
    save_file(tensors, saved.folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((saved.plain / "config.json").read_text())
    values["quantization_config"] = {"quant_method": NAME, **quantization_config}
    (saved.folder / "config.json").write_text(json.dumps(values))
    return saved


@pytest.fixture(params=[RowInt8(), PackedRowInt8()], ids=["through floats", "packed as codes"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LinearMethod:
    """Registered for the test."""
    monkeypatch.setitem(FORMATS, NAME, lambda config: _format(request.param, config))
    return request.param


@pytest.fixture
def plain_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, NAME, lambda config: _format(RowInt8(), config))


def _load(folder: Path, size: int = 1, launcher: ThreadLauncher | None = None, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {
        "dtype": "float32", "kv_cache_bytes": 1 << 20, "max_num_seqs": 8, "max_num_batched_tokens": 13, "num_threads": 1,
        "parallel": ParallelConfig(rank_deadline_s=60.0),
    }  # fmt: skip
    return load_engine(
        EngineConfig(model=str(folder), tensor_parallel_size=size, **{**defaults, **settings}), launcher=launcher or ThreadLauncher()
    )


def _answers(folder: Path, size: int, **settings: Any) -> tuple[str, list[Any]]:
    engine = _load(folder, size, **settings)
    try:
        return engine.description.fingerprint, run(engine, requests_for(tiny_prompts(), GREEDY))
    finally:
        engine.close()


@pytest.mark.usefixtures("method")
@pytest.mark.parametrize("runner", ["native", "transformers"])
@pytest.mark.parametrize("name", ["llama-tied", "llama-untied"])
def test_format_of_one_class_loads_runs_and_divides_as_the_floats_it_stands_for(tmp_path: Path, name: str, runner: str) -> None:
    saved = _saved(name, tmp_path)
    expected = generated_by_transformers(saved.plain, tiny_prompts(), NUM_OUTPUT)
    fingerprint, whole = _answers(saved.folder, 1, runner=runner)
    assert [one.token_ids for one in whole] == expected
    fingerprint_at_two, divided = _answers(saved.folder, 2, runner=runner)
    assert [one.token_ids for one in divided] == expected
    assert fingerprint == fingerprint_at_two
    for one, other in zip(whole, divided, strict=True):
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert [value for _, value in a.top] == pytest.approx([value for _, value in b.top], abs=1e-4)


def test_codes_packed_as_they_are_stand_for_the_same_floats() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [
        {
            "codes": torch.randint(-128, 128, (rows, 70), dtype=torch.int8, generator=generator),
            "codes.scale": torch.rand(rows, 1, generator=generator),
            "version": torch.tensor([1, 2, 3]),
        }
        for rows in (5, 20)
    ]
    method = PackedRowInt8()
    assert torch.equal(unpack(method.pack("qkv", parts, torch.float32)), torch.cat([method.weight(part) for part in parts]))


@pytest.mark.usefixtures("plain_method")
def test_format_with_a_quantization_is_rounded_again_for_the_native_runner(tmp_path: Path) -> None:
    saved = _saved("llama", tmp_path)
    engine = _load(saved.folder, quantization="int8", quantized_cache_bytes=0)
    assert (engine.description.runner, engine.description.quantization) == ("native", "int8")


@pytest.mark.usefixtures("plain_method")
def test_linears_of_two_formats_in_one_projection_run_through_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = _saved("llama", tmp_path, dense=("v_proj",))
    with caplog.at_level(logging.WARNING):
        engine = _load(saved.folder)
    assert "layers.0.qkv joins linears of different formats" in caplog.text
    results = run(engine, requests_for(tiny_prompts(), GREEDY))
    assert [one.token_ids for one in results] == generated_by_transformers(saved.plain, tiny_prompts(), NUM_OUTPUT)


@pytest.mark.usefixtures("plain_method")
def test_linear_that_the_configuration_calls_dense_and_the_checkpoint_does_not_is_refused_by_name(tmp_path: Path) -> None:
    saved = _saved("llama", tmp_path, ignore=["model.layers.1.mlp.up_proj"])
    with pytest.raises(UnsupportedModel, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        _load(saved.folder)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.usefixtures("plain_method")
def test_tensor_of_another_shape_than_the_format_says_is_refused_by_name(tmp_path: Path, size: int) -> None:
    saved = _saved("llama", tmp_path)
    values = json.loads((saved.folder / "config.json").read_text())
    (saved.folder / "config.json").write_text(json.dumps({**values, "intermediate_size": 48}))
    with pytest.raises(UnsupportedModel, match=r"gate_proj\.codes has shape \(64, 32\), the model wants \(48, 32\)"):
        _load(saved.folder, size)


CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "fp8": {"activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "compressed-tensors": {"format": "pack-quantized", "config_groups": {}, "ignore": ["lm_head"]},
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "mxfp4": {"modules_to_not_convert": ["lm_head"]},
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("quant_method", CONFIGS)
def test_checkpoint_in_a_format_that_is_not_served_is_refused_before_its_weights_are_read(
    tmp_path: Path, quant_method: str, size: int
) -> None:
    LlamaConfig(**SIZES, quantization_config={"quant_method": quant_method, **CONFIGS[quant_method]}).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == quant_method
    launcher = ThreadLauncher()
    with pytest.raises(UnsupportedModel) as refused:
        _load(tmp_path, size, launcher)
    message = str(refused.value)
    assert f"'llama' has weights quantized with quant_method {quant_method!r}, which is not served; load the unquantized" in message
    assert "`quantization: int8` or int4" in message
    assert "\n" not in message
    assert launcher.ranks == [], "no rank was started"


def test_checkpoint_in_no_named_format_is_refused_too(tmp_path: Path) -> None:
    LlamaConfig(**SIZES, quantization_config={"quant_algo": "NVFP4"}).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="quant_method None, which is not served"):
        _load(tmp_path)
