"""Products of bfloat16 pairs: their arithmetic, emulated and by the instruction, against exact numbers; and engines that use them."""

from __future__ import annotations

import ctypes
import logging
import math
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.model.native_decoder import NativeDecoder
from replicas.model.runner import StepResult
from replicas.native.build import load_native_library, variant_of
from replicas.native.isa import AVX512_BF16, EMULATED, PLAIN, cpu_flags
from replicas.native.packing import Element, pack
from replicas.sampling_params import SamplingParams
from tests.engine_harness import requests_for, run
from tests.tiny_models import save_tiny_model, tiny_prompts
from tests.unit.native_kernels import assembly_of_tile, multiply

LANES = 16
LEAST_NORMAL = Fraction(2) ** -126


@pytest.fixture(scope="module", params=[EMULATED, AVX512_BF16], ids=lambda isa: isa.name)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    if not request.param.cpu_flags <= cpu_flags():
        pytest.skip("waits for a CPU with avx512_bf16")
    return load_native_library(variants=[request.param])


def _fused(a: float, b: float, c: float) -> float:
    """a * b + c as Intel's manual has it for VDPBF16PS: rounded once to 24 bits, ties to even; denormals in and out are zeros."""
    if math.isinf(c):
        return c
    a, b, c = (0.0 if abs(x) < LEAST_NORMAL else x for x in (a, b, c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return 0.0
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    exponent -= abs(exact) < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - 23)
    rounded = round(exact / unit) * unit
    if abs(rounded) < LEAST_NORMAL:
        return 0.0
    return math.copysign(math.inf, rounded) if abs(rounded) >= Fraction(2) ** 128 else float(rounded)


def _dot(sum_: float, a: tuple[float, float], b: tuple[float, float]) -> float:
    return _fused(a[0], b[0], _fused(a[1], b[1], sum_))


def _bfloat16(bits: int) -> float:
    return _float32(bits << 16)


def _float32(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


# Exponents where products and sums meet each other and the ends of the range.
half_bits = st.builds(
    lambda sign, exponent, mantissa: sign << 15 | exponent << 7 | mantissa,
    st.integers(0, 1), st.sampled_from([0, 1, 2, 50, 51, 63, 64, 76, 77, 126, 127, 128, 139, 190, 191, 254]), st.integers(0, 127),
)  # fmt: skip
sum_bits = st.builds(
    lambda sign, exponent, mantissa: sign << 31 | exponent << 23 | mantissa,
    st.integers(0, 1), st.sampled_from([0, 1, 2, 25, 26, 103, 126, 127, 128, 150, 253, 254]), st.integers(0, 2**23 - 1),
)  # fmt: skip
lane_bits = st.tuples(sum_bits, half_bits, half_bits, half_bits, half_bits)


def _add_dots(library: ctypes.CDLL, lanes: list[tuple[int, int, int, int, int]]) -> list[float]:
    sums = (ctypes.c_uint32 * LANES)(*(lane[0] for lane in lanes))
    a = (ctypes.c_uint32 * LANES)(*(lane[1] | lane[2] << 16 for lane in lanes))
    b = (ctypes.c_uint32 * LANES)(*(lane[3] | lane[4] << 16 for lane in lanes))
    library.manta_add_dots(sums, a, b, ctypes.c_int64(1))
    return [_float32(bits) for bits in sums]


@settings(max_examples=60, deadline=None)
@given(lanes=st.lists(lane_bits, min_size=LANES, max_size=LANES))
def test_dot_of_pairs_equals_exact_arithmetic_rounded_after_each_sum(
    library: ctypes.CDLL, lanes: list[tuple[int, int, int, int, int]]
) -> None:
    expected = [_dot(_float32(sum_), (_bfloat16(a0), _bfloat16(a1)), (_bfloat16(b0), _bfloat16(b1))) for sum_, a0, a1, b0, b1 in lanes]
    assert _add_dots(library, lanes) == expected


ONE, LARGE, TINY = 0x3F80, 0x7F00, 0x0040  # 1, 2^127, 2^-127


@pytest.mark.parametrize(
    ("lane", "expected"),
    [
        # The upper pair goes first: -2^127 + 2^127 + 1. The other way the 1 would be lost.
        ((0xFF000000, ONE, LARGE, ONE, ONE), 1.0),
        # A denormal factor, and a denormal sum on its way in.
        ((0x00400000, TINY, TINY, LARGE, LARGE), 0.0),
        # 2^-63 * -2^-88 takes half of a bit of 24 from the least normal number, a tie that rounds back to it; a whole bit makes it zero.
        ((0x00800000, 0x2000, 0, 0x9380, 0), float(LEAST_NORMAL)),
        ((0x00800000, 0x2000, 0, 0x9400, 0), 0.0),
        ((0x7F7FFFFF, LARGE, 0, ONE, 0), math.inf),
    ],
    ids=["order", "denormals in", "tie at the least normal number", "denormal out", "overflow"],
)
def test_dot_of_pairs_at_the_edges(library: ctypes.CDLL, lane: tuple[int, int, int, int, int], expected: float) -> None:
    assert _add_dots(library, [lane] * LANES) == [expected] * LANES


def test_dot_of_pairs_with_a_nan_is_nan(library: ctypes.CDLL) -> None:
    assert all(math.isnan(value) for value in _add_dots(library, [(0x3F800000, ONE, 0x7FC0, ONE, 0)] * LANES))


@settings(max_examples=25, deadline=None)
@given(num_rows=st.integers(1, 26), num_k=st.integers(1, 7), num_outputs=st.integers(1, 34), seed=st.integers(0, 2**16))
def test_multiply_adds_pairs_of_k_in_ascending_order(library: ctypes.CDLL, num_rows: int, num_k: int, num_outputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a_MK = torch.randn(num_rows, num_k, generator=generator)
    w_NK = torch.randn(num_outputs, num_k, generator=generator).bfloat16()
    found_MN = multiply(library, a_MK, pack(w_NK, Element.BFLOAT16))
    rows, outputs = ([[*row, 0.0] for row in values.bfloat16().tolist()] for values in (a_MK, w_NK))
    for row, found in zip(rows[:: max(1, num_rows - 1)], found_MN[:: max(1, num_rows - 1)].tolist(), strict=True):
        sums = [0.0] * num_outputs
        for k in range(0, num_k, 2):
            sums = [_dot(sum_, tuple(row[k : k + 2]), tuple(w[k : k + 2])) for sum_, w in zip(sums, outputs, strict=True)]  # type: ignore[arg-type]
        assert found == sums


def test_the_tile_compiles_to_the_instruction(tmp_path: Path) -> None:
    assert "vdpbf16ps" in assembly_of_tile(AVX512_BF16, "BFloat16Element", tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama-untied", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads an engine as on a CPU whose best variant is the emulated one."""
    monkeypatch.setattr("replicas.model.loader.runnable", lambda flags: [EMULATED, PLAIN])

    def load(**kwargs: Any) -> Engine:
        return load_engine(
            EngineConfig(
                model=str(folder), kv_cache_bytes=4 << 20, max_num_seqs=8, max_num_batched_tokens=13, **{"dtype": "bfloat16", **kwargs}
            )
        )

    return load


def test_greedy_tokens_are_near_the_best_and_the_same_alone_and_batched(load: Any, folder: Path) -> None:
    engine = load()
    assert (engine.description.runner, engine.description.kernels) == ("native", "emulated")
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = tiny_prompts()
    batched = run(engine, requests_for(prompts, greedy))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float().eval()
    for index, (prompt, result) in enumerate(zip(prompts, batched, strict=True)):
        (alone,) = run(engine, requests_for([prompt], greedy, prefix=f"alone{index}"))
        assert alone.token_ids == result.token_ids
        with torch.inference_mode():
            logprobs_TV = model(torch.tensor([prompt + result.token_ids])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        gaps_T = logprobs_TV.amax(-1) - logprobs_TV.gather(-1, torch.tensor(result.token_ids)[:, None])[:, 0]
        assert float(gaps_T.max()) <= 0.25


def test_round_activations_false_takes_a_variant_that_rounds_nothing(load: Any) -> None:
    assert load(round_activations=False).description.kernels == "plain"
    assert load(quantization="int8").description.kernels == "emulated"
    assert load(quantization="int8", dtype="float32").description.kernels == "plain", "float32 is what was asked for"


def test_load_when_rounded_activations_fail_the_self_check_keeps_them_float32(
    load: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = NativeDecoder.forward

    def spoiled(decoder: NativeDecoder, step: Any) -> StepResult:
        result = whole(decoder, step)
        if not variant_of(decoder._library).rounds_activations:
            return result
        return StepResult(logits_NV=result.logits_NV + torch.rand_like(result.logits_NV) * 100)

    monkeypatch.setattr(NativeDecoder, "forward", spoiled)
    with caplog.at_level(logging.WARNING):
        engine = load()
    assert (engine.description.runner, engine.description.kernels) == ("native", "plain")
    assert "loading again with activations that are not rounded: its logits differ from transformers'" in caplog.text
