"""The compiled kernels: building them, multiplying, and the native step against its readable twins."""

import copy
import ctypes
import logging
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from kvcache.tensors import KVTensors
from replicas.attention.step_tensors import StepTensors
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.linear.dense import Dense
from replicas.linear.quantize_at_load import QuantizeAtLoad
from replicas.model import native_decoder
from replicas.model.native_decoder import LAYOUT, NativeDecoder, NativeMismatch, SegmentedDecoder, why_not_native
from replicas.model.runner import StepResult, kv_groups, probe_layers
from replicas.native import build
from replicas.native.build import NativeUnavailable, load_native_library, variant_of
from replicas.native.isa import AVX2, AVX512, AVX512_BF16, AVX512_VNNI, EMULATED, PLAIN, InstructionSet, cpu_flags, runnable
from replicas.native.packing import Element, PackedLinear, pack, unpack
from replicas.native.structs import StructMismatch
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import ScheduledChunk, StepPlan
from tests.unit.native_kernels import as_multiplied, multiply

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[*runnable(cpu_flags()), EMULATED], ids=lambda isa: isa.name)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """Every variant of the kernels that this machine can run."""
    return load_native_library(variants=[request.param])


def _packed(num_outputs: int, num_k: int, element: Element, seed: int = 0) -> PackedLinear:
    weight_NK = torch.randn(num_outputs, num_k, generator=torch.Generator().manual_seed(seed))
    return pack(weight_NK.bfloat16() if element is Element.BFLOAT16 else weight_NK, element)


@settings(max_examples=80, deadline=None)
@given(
    num_rows=st.one_of(st.integers(1, 40), st.just(100)),
    num_k=st.one_of(st.integers(1, 80), st.sampled_from([255, 600, 1025, 2050, 3700, 6600])),  # the last four: blocks of k
    num_outputs=st.integers(1, 150),
    element=st.sampled_from(Element),
    seed=st.integers(0, 2**16),
)
def test_multiply_of_any_shape_equals_float64(
    library: ctypes.CDLL, num_rows: int, num_k: int, num_outputs: int, element: Element, seed: int
) -> None:
    packed = _packed(num_outputs, num_k, element, seed)
    w_NK = unpack(packed).double()
    a_MK = torch.randn(num_rows, num_k, generator=torch.Generator().manual_seed(seed + 1))
    expected = as_multiplied(a_MK, element, variant_of(library)).double() @ w_NK.T
    # Far above K roundings of the running sum, whose terms are as large as the row's largest weight in a quantized type.
    size_NK = w_NK.abs().amax(1, keepdim=True).expand_as(w_NK) if element.is_quantized else w_NK.abs()
    bound = 1e-6 * (num_k + 8) * (a_MK.abs().double() @ size_NK.T)
    if element.is_quantized and variant_of(library).rounds_for_quantized:
        # An input next to the middle between two steps may be rounded the other way.
        bound += a_MK.abs().amax(1, keepdim=True).double() / 32639 * size_NK[:, 0] * 1.001
    assert bool(((multiply(library, a_MK, packed).double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("element", Element)
def test_multiply_of_a_row_gives_the_same_bits_alone_and_in_any_batch(library: ctypes.CDLL, element: Element) -> None:
    num_outputs, num_k = (40, 6601) if element.is_quantized else (100, 2101)  # blocks of k
    a_MK, packed = torch.randn(100, num_k), _packed(num_outputs, num_k, element)
    alone = torch.cat([multiply(library, a_MK[i : i + 1].contiguous(), packed) for i in range(100)])
    for size in (2, 3, 5, 6, 7, 8, 9, 17, 100):  # the last: blocks of tiles
        assert torch.equal(multiply(library, a_MK[:size].contiguous(), packed), alone[:size])


@pytest.mark.parametrize("element", Element)
@pytest.mark.parametrize("num_outputs", [20, 150])
def test_multiply_gives_the_same_bits_with_any_number_of_threads(library: ctypes.CDLL, element: Element, num_outputs: int) -> None:
    a_MK, packed = torch.randn(19, 70), _packed(num_outputs, 70, element)
    expected = multiply(library, a_MK, packed, num_threads=1)
    for num_threads in (2, 3, 7):  # more threads than panels, too
        for _ in range(5):  # who takes which panel differs
            assert torch.equal(multiply(library, a_MK, packed, num_threads), expected)


CONFIG = LlamaConfig(
    vocab_size=90, hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    head_dim=24, max_position_embeddings=256,
)  # fmt: skip


def _decoder(kind: type[NativeDecoder], library: ctypes.CDLL, dtype: torch.dtype, **kwargs: Any) -> NativeDecoder:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG), dtype=dtype).eval()
    calls = probe_layers(model)
    kv = KVTensors(kv_groups(calls), layout=LAYOUT, num_blocks=32, block_size=16, dtype=dtype, device=CPU)
    kv.fill(range(32), float("nan"))
    return kind(library, model, calls, kv, **kwargs)


def _step(chunks: list[tuple[list[int], int, int]], first_block: int = 0) -> StepTensors:
    """Chunks of (sequence, start, end); sequence i has blocks of its own."""
    scheduled = []
    for index, (token_ids, start, end) in enumerate(chunks):
        state: Any = object.__new__(RequestState)
        state.token_ids, state.block_ids = token_ids, list(range(first_block + 8 * index, first_block + 8 * index + 8))
        scheduled.append(ScheduledChunk(state=state, start=start, num_tokens=end - start, is_prefill=True, logits=range(end - 1, end)))
    return StepTensors.of(StepPlan(chunks=tuple(scheduled)), 16)


def _sequence(length: int, seed: int) -> list[int]:
    return torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


WEIGHTS = pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "int8"), (torch.bfloat16, "int4")],
    ids=["float32", "bfloat16", "int8", "int4"],
)


@WEIGHTS
def test_decoder_whole_chunked_alone_or_batched_gives_the_same_bits(library: ctypes.CDLL, dtype: torch.dtype, quantization: Any) -> None:
    sequence, others = _sequence(77, 0), [_sequence(40, i) for i in (1, 2)]
    whole = _decoder(NativeDecoder, library, dtype, quantization=quantization).forward(_step([(sequence, 0, 77)])).logits_NV[0]
    chunked = _decoder(NativeDecoder, library, dtype, quantization=quantization)
    for start, end in ((0, 7), (7, 64), (64, 76)):
        chunked.forward(_step([(sequence, start, end), (others[0], start // 2, end // 2)]))
    last = chunked.forward(_step([(sequence, 76, 77), (others[0], 38, 40), (others[1], 0, 40)])).logits_NV
    assert torch.equal(last[0], whole)


@WEIGHTS
def test_segmented_twin_gives_the_same_bits_and_its_seams_see_every_delta(
    library: ctypes.CDLL, dtype: torch.dtype, quantization: Any
) -> None:
    seen: list[tuple[int, ...]] = []
    step = _step([(_sequence(20, 0), 0, 20), (_sequence(9, 3), 0, 9)])
    kwargs: dict[str, Any] = {"quantization": quantization}
    twin = _decoder(SegmentedDecoder, library, dtype, all_reduce=lambda delta: seen.append(tuple(delta.shape)), **kwargs)
    assert torch.equal(twin.forward(step).logits_NV, _decoder(NativeDecoder, library, dtype, **kwargs).forward(step).logits_NV)
    assert seen == [(29, 48)] * (2 * CONFIG.num_hidden_layers)
    zeroed = _decoder(SegmentedDecoder, library, dtype, all_reduce=lambda delta: delta.zero_(), **kwargs)
    assert not torch.equal(zeroed.forward(step).logits_NV, twin.forward(step).logits_NV)


def test_decoder_takes_the_weights_of_linears_and_leaves_the_table(library: ctypes.CDLL) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": True})).eval()
    calls = probe_layers(model)
    kv = KVTensors(kv_groups(calls), layout=LAYOUT, num_blocks=2, block_size=16, dtype=torch.float32, device=CPU)
    NativeDecoder(library, model, calls, kv)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert len(linears) == 7 * CONFIG.num_hidden_layers + 1
    assert all(linear.weight is None for linear in linears), "memory would be held twice"
    assert model.model.embed_tokens.weight.shape == (CONFIG.vocab_size, CONFIG.hidden_size)


def test_decoder_under_another_default_dtype_of_torch_gives_the_same_bits(library: ctypes.CDLL, request: pytest.FixtureRequest) -> None:
    step = _step([(_sequence(20, 0), 0, 20)])
    expected = _decoder(NativeDecoder, library, torch.float32).forward(step).logits_NV
    decoder = _decoder(NativeDecoder, library, torch.float32)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.float64)  # a narrower one would let the kernels write past the end of what they got
    assert torch.equal(decoder.forward(step).logits_NV, expected)


def test_decoder_in_bfloat16_is_nearer_to_float32_than_transformers_in_bfloat16(library: ctypes.CDLL) -> None:
    sequence = _sequence(30, 5)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG), dtype=torch.bfloat16).eval()
    ids = torch.tensor([sequence])
    with torch.inference_mode():
        theirs = model(ids).logits[0, -1].float()
        exact = model.float()(ids).logits[0, -1]
    ours = _decoder(NativeDecoder, library, torch.bfloat16).forward(_step([(sequence, 0, 30)])).logits_NV[0]
    assert float((ours - exact).abs().mean()) < float((theirs - exact).abs().mean())


@pytest.mark.parametrize(("quantization", "element"), [("int8", Element.INT8), ("int4", Element.INT4)])
def test_quantized_decoder_equals_transformers_over_the_weights_it_stands_for(
    library: ctypes.CDLL, quantization: Any, element: Element
) -> None:
    sequence = _sequence(30, 5)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG)).eval()
    ids = torch.tensor([sequence])
    with torch.inference_mode():
        exact = model(ids).logits[0, -1]
    method = QuantizeAtLoad(stored=Dense(), quantization=quantization)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = method.weight({"weight": module.weight.data})
            module.register_forward_pre_hook(lambda module, inputs: (as_multiplied(inputs[0], element, variant_of(library)),))
    with torch.inference_mode():
        theirs = model(ids).logits[0, -1]
    ours = _decoder(NativeDecoder, library, torch.float32, quantization=quantization).forward(_step([(sequence, 0, 30)])).logits_NV[0]
    # An input next to the middle between two steps may be rounded the other way.
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    rounding = float((ours - exact).abs().max())
    assert float((ours - theirs).abs().max()) < rounding / 20, "the comparison tells nothing"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LlamaConfig(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (LlamaConfig(mlp_bias=True), "MLP has biases"),
        (GPT2Config(), "'gpt2' is not one of llama, mistral, qwen2, qwen3"),
        (LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}), "a part of each head"),
    ],
)
def test_why_not_native_names_the_reason(config: Any, reason: str) -> None:
    assert reason in (why_not_native(config) or "")


def _saved_model(folder: Path) -> Path:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG)).save_pretrained(folder)
    return folder


def test_load_without_a_compiler_serves_through_transformers_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _saved_model(tmp_path)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        engine = load_engine(EngineConfig(model=str(folder), kv_cache_bytes=1 << 20))
    assert engine.description.runner == "transformers"
    assert "runner transformers: native cannot serve here (no C++ compiler" in caplog.text
    with pytest.raises(ValueError, match="runner 'native' cannot serve 'llama' here: no C"):
        load_engine(EngineConfig(model=str(folder), runner="native"))


def test_load_when_the_native_logits_differ_serves_through_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _saved_model(tmp_path)
    whole = NativeDecoder.forward
    monkeypatch.setattr(NativeDecoder, "forward", lambda self, step: StepResult(logits_NV=whole(self, step).logits_NV + torch.rand(90)))
    with caplog.at_level(logging.WARNING):
        engine = load_engine(EngineConfig(model=str(folder), kv_cache_bytes=1 << 20))
    assert engine.description.runner == "transformers"
    assert "differ from transformers" in caplog.text


def test_load_with_a_quantization_caches_it_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    library = load_native_library(Path("~/.cache/manta/native").expanduser())
    monkeypatch.setattr("replicas.model.loader.load_native_library", lambda **variants: library)
    config = EngineConfig(model=str(_saved_model(tmp_path / "model")), kv_cache_bytes=1 << 20, quantization="int8")
    fingerprints = set()
    for logged in ("kept the quantized weights", "quantized weights from"):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            description = load_engine(config).description
        assert (description.runner, description.quantization) == ("native", "int8")
        assert logged in caplog.text
        fingerprints.add(description.fingerprint)
    fingerprints.add(load_engine(replace(config, quantization=None)).description.fingerprint)
    assert len(fingerprints) == 2, "KV of other weights must not be taken for one's own"


def test_load_with_a_quantization_that_cannot_be_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="quantization must be int8 or int4, or left out, got 'int3'"):
        EngineConfig(quantization="int3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs the native runner; leave runner at 'auto'"):
        EngineConfig(quantization="int8", runner="transformers")
    folder = str(_saved_model(tmp_path))
    with pytest.raises(ValueError, match="needs dtype float32 or bfloat16, not float16"):
        load_engine(EngineConfig(model=folder, quantization="int8", dtype="float16"))
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="quantization 'int4' needs the native runner, which cannot serve 'llama' here: no C"):
        load_engine(EngineConfig(model=folder, quantization="int4"))


def test_decoder_refuses_layers_of_different_shape(library: ctypes.CDLL) -> None:
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG))
    calls: Mapping[int, Any] = dict(probe_layers(model))
    calls[1] = type(calls[1])(**{**{f: getattr(calls[1], f) for f in calls[1].__dataclass_fields__}, "k_dim": 8})  # type: ignore[index]
    kv: Any = None
    with pytest.raises(NativeMismatch, match="differ in shape"):
        NativeDecoder(library, model, calls, kv)


def test_decoder_refuses_structs_that_the_kernels_do_not_mirror(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    longer = type("Longer", (ctypes.Structure,), {"_fields_": [*native_decoder._Step._fields_, ("extra", ctypes.c_int64)]})
    monkeypatch.setattr(native_decoder, "_Step", longer)
    with pytest.raises(StructMismatch, match="MantaStep has"):
        _decoder(NativeDecoder, library, torch.float32)


def test_runnable_variants_follow_the_cpu_flags(tmp_path: Path) -> None:
    assert runnable(frozenset()) == [PLAIN]
    assert runnable(AVX2.cpu_flags | {"sse2"}) == [AVX2, PLAIN]
    assert runnable(AVX512.cpu_flags) == [AVX512, AVX2, PLAIN]
    assert runnable(AVX512_VNNI.cpu_flags) == [AVX512_VNNI, AVX512, AVX2, PLAIN]
    assert runnable(AVX512_BF16.cpu_flags) == [AVX512_BF16, AVX512_VNNI, AVX512, AVX2, PLAIN]
    assert runnable(AVX512.cpu_flags - {"avx512vl"}) == [AVX2, PLAIN]
    assert cpu_flags(tmp_path / "none") == frozenset()


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the kernels, which take ten seconds to build."""
    folder = tmp_path / "source"
    folder.mkdir()
    source = folder / "kernels.cpp"
    source.write_text('extern "C" int manta_answer() { return 42; }')
    monkeypatch.setattr(build, "SOURCE", source)
    return source


def test_build_replaces_a_broken_library(tmp_path: Path, small_source: Path) -> None:
    whole = Path(load_native_library(tmp_path / "whole")._name)
    broken = tmp_path / "broken" / whole.name
    broken.parent.mkdir()
    broken.write_bytes(whole.read_bytes()[:1000])
    (broken.parent / whole.with_suffix(".sha256").name).write_bytes(whole.with_suffix(".sha256").read_bytes())
    assert load_native_library(tmp_path / "broken").manta_answer() == 42
    assert broken.stat().st_size > 1000


def test_build_with_a_compiler_too_old_for_the_best_variant_takes_the_next(
    tmp_path: Path, small_source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    future = InstructionSet("future", ("-mno-such-instructions",), frozenset())
    with caplog.at_level(logging.INFO):
        library = load_native_library(tmp_path / "cache", [future, PLAIN])
    assert library.manta_answer() == 42
    assert "no CPU kernels for future: " in caplog.text
    assert "CPU kernels: plain" in caplog.text
    with pytest.raises(NativeUnavailable, match="no-such-instructions"):
        load_native_library(tmp_path / "cache", [future])


def test_build_by_two_processes_at_once_succeeds_in_both(tmp_path: Path, small_source: Path) -> None:
    cache = tmp_path / "cache"
    code = (
        f"from pathlib import Path; from replicas.native import build; build.SOURCE = Path({str(small_source)!r}); "
        f"build.load_native_library(Path({str(cache)!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as one, subprocess.Popen([sys.executable, "-c", code]) as two:
        assert [one.wait(), two.wait()] == [0, 0]
    assert sorted(path.suffix for path in cache.iterdir()) == [".sha256", ".so"]


def test_build_error_names_the_compiler_and_its_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "kernels.cpp"
    broken.write_text("not C++")
    monkeypatch.setattr(build, "SOURCE", broken)
    with pytest.raises(NativeUnavailable, match=r"g\+\+ failed: .*kernels.cpp"):
        load_native_library(tmp_path / "cache")
