"""Every backend against the reference, and the reference against torch's own attention."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.spec import KVGroupSpec
from kvcache.tensors import KVTensors
from replicas.attention.backend import AttentionBackend, LayerCall
from replicas.attention.native import NativeAttention
from replicas.attention.reference import ReferenceAttention, attend_one
from replicas.attention.step_tensors import StepTensors
from replicas.native.build import load_native_library
from replicas.native.isa import AVX512_BF16, EMULATED, cpu_flags, runnable
from replicas.scheduling.step_plan import ScheduledChunk, StepPlan

CPU = torch.device("cpu")
RUNNABLE = runnable(cpu_flags())
VARIANTS = RUNNABLE if AVX512_BF16 in RUNNABLE else [*RUNNABLE, EMULATED]


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda isa: isa.name)
def native(request: pytest.FixtureRequest) -> NativeAttention:
    """Every variant of the kernel that this machine can run, and the arithmetic of a better one written out."""
    return NativeAttention(load_native_library(variants=[request.param]))


def _call(num_heads: int, num_kv_heads: int, k_dim: int, v_dim: int, window: int | None = None, softcap: float | None = None) -> LayerCall:
    return LayerCall(
        layer=0,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        scale=k_dim**-0.5,
        window=window,
        softcap=softcap,
    )


class _Case:
    """A step over random KV: `lens` are (tokens before the step, tokens in it) of each request."""

    def __init__(self, call: LayerCall, lens: list[tuple[int, int]], block_size: int, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.call, self.lens, self.block_size, self.dtype = call, lens, block_size, dtype
        counts = [-(-(old + new) // block_size) for old, new in lens]
        self.num_blocks = sum(counts) + 2
        order = torch.randperm(self.num_blocks, generator=generator).tolist()
        chunks = []
        for old, new in lens:
            blocks, order = order[: counts[len(chunks)]], order[counts[len(chunks)] :]
            state: Any = SimpleNamespace(block_ids=blocks, token_ids=[0] * (old + new))
            chunks.append(ScheduledChunk(state=state, start=old, num_tokens=new, is_prefill=True, logits=range(old + new - 1, old + new)))
        self.chunks = chunks
        num_tokens = sum(new for _, new in lens)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        # As models give them: queries and keys as [head, token, dim] in memory, values as a transposed view.
        self.q_HTD = random(call.num_heads, num_tokens, call.k_dim)
        self.k_KTD = random(call.num_kv_heads, num_tokens, call.k_dim)
        self.v_KTD = random(num_tokens, call.num_kv_heads, call.v_dim).transpose(0, 1)
        self.k_old = random(self.num_blocks, call.num_kv_heads, block_size, call.k_dim)
        self.v_old = random(self.num_blocks, call.num_kv_heads, block_size, call.v_dim)

    def in_float64(self, *, sizes_of_values: bool = False) -> "_Case":
        """The same case in float64; with `sizes_of_values`, values lose their sign."""
        case = copy.copy(self)
        case.dtype = torch.float64
        case.q_HTD, case.k_KTD, case.v_KTD, case.k_old, case.v_old = (
            x.double() for x in (self.q_HTD, self.k_KTD, self.v_KTD, self.k_old, self.v_old)
        )
        if sizes_of_values:
            case.v_KTD, case.v_old = case.v_KTD.abs(), case.v_old.abs()
        return case

    def run(self, backend: AttentionBackend, *, poison: bool = True) -> tuple[torch.Tensor, KVTensors]:
        """Runs the step. With `poison`, every slot that no token was written to holds NaN."""
        call = self.call
        group = KVGroupSpec(layers=(0,), kind="full", window=None, num_kv_heads=call.num_kv_heads, k_dim=call.k_dim, v_dim=call.v_dim)
        kv = KVTensors([group], layout=backend.layout, num_blocks=self.num_blocks, block_size=self.block_size, dtype=self.dtype, device=CPU)
        kv.fill(range(self.num_blocks), float("nan") if poison else 0.0)
        for to, old in zip(kv.canonical(0), (self.k_old, self.v_old), strict=True):
            for chunk in self.chunks:
                for position in range(chunk.start):
                    block, offset = chunk.state.block_ids[position // self.block_size], position % self.block_size
                    to[block, :, offset] = old[block, :, offset]
        step = StepTensors.of(StepPlan(chunks=tuple(self.chunks)), self.block_size)
        return backend.attend(call, self.q_HTD, self.k_KTD, self.v_KTD, kv.layer(0), step), kv


def test_reference_without_window_equals_scaled_dot_product_attention() -> None:
    call = _call(6, 2, 16, 16)
    q_HTD, k_CKD, v_CKD = torch.randn(6, 5, 16), torch.randn(11, 2, 16), torch.randn(11, 2, 16)
    visible_TC = torch.ones(5, 11, dtype=torch.bool).tril(6)
    expected_HTD = torch.nn.functional.scaled_dot_product_attention(
        q_HTD[None], k_CKD.transpose(0, 1)[None], v_CKD.transpose(0, 1)[None], attn_mask=visible_TC, enable_gqa=True
    )[0]
    torch.testing.assert_close(attend_one(call, q_HTD, k_CKD, v_CKD), expected_HTD.transpose(0, 1))


def test_reference_with_window_and_softcap_equals_the_formula() -> None:
    call = _call(1, 1, 4, 4, window=3, softcap=2.0)
    q_HTD, k_CKD, v_CKD = torch.randn(1, 1, 4), torch.randn(6, 1, 4), torch.randn(6, 1, 4)
    scores = 2.0 * torch.tanh((k_CKD[3:, 0] @ q_HTD[0, 0]) / 2 / 2.0)  # scale is 4 ** -0.5
    expected = scores.softmax(0) @ v_CKD[3:, 0]
    torch.testing.assert_close(attend_one(call, q_HTD, k_CKD, v_CKD)[0, 0], expected)


lens_strategy = st.lists(st.tuples(st.integers(0, 300), st.one_of(st.just(1), st.integers(1, 70))), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    lens=lens_strategy,
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (9, 3), (8, 1)]),
    dims=st.sampled_from([(8, 8), (16, 16), (64, 64), (24, 24), (48, 40)]),
    block_size=st.sampled_from([1, 7, 16, 32, 48]),
    window=st.sampled_from([None, 1, 20, 128, 200]),
    softcap=st.sampled_from([None, 5.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_native_over_random_steps_equals_reference(
    native: NativeAttention,
    lens: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    block_size: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    case = _Case(_call(*heads, *dims, window=window, softcap=softcap), lens, block_size, dtype, seed)
    expected, expected_kv = case.run(ReferenceAttention())
    found, found_kv = case.run(native)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    for one, other in zip(found_kv.canonical(0), expected_kv.canonical(0), strict=True):
        assert torch.equal(one.isnan(), other.isnan()), "a slot outside the step was written"
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_native_in_bfloat16_rounds_weights_and_outputs_once_and_nothing_else(native: NativeAttention) -> None:
    case = _Case(_call(6, 2, 48, 32), [(250, 40), (77, 1), (0, 9)], 16, torch.bfloat16, seed=9)
    found, _ = case.run(native)
    expected, _ = case.in_float64().run(ReferenceAttention())
    size, _ = case.in_float64(sizes_of_values=True).run(ReferenceAttention())
    # A rounded weight moves its own share of the sum and, through their total, that of all others; float32 sums stay below 1e-5.
    assert bool(((found.double() - expected).abs() <= 2**-9 * (size + 2 * expected.abs()) + 1e-5).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 50])
def test_native_whole_or_in_chunks_or_beside_others_gives_the_same_bits(
    native: NativeAttention, dtype: torch.dtype, window: int | None
) -> None:
    call = _call(6, 2, 32, 32, window=window)
    whole = _Case(call, [(0, 211)], 16, dtype, seed=5)
    expected, whole_kv = whole.run(native)
    blocks = whole.chunks[0].state.block_ids
    other_blocks = [b for b in range(whole.num_blocks) if b not in blocks]
    start = 0
    for end in (7, 64, 65, 190, 211):
        rows = slice(start, end)
        state: Any = whole.chunks[0].state
        chunk = ScheduledChunk(state=state, start=start, num_tokens=end - start, is_prefill=True, logits=range(end - 1, end))
        other: Any = SimpleNamespace(block_ids=other_blocks, token_ids=[0] * 3)
        beside = ScheduledChunk(state=other, start=0, num_tokens=3, is_prefill=True, logits=range(2, 3))
        step = StepTensors.of(StepPlan(chunks=(beside, chunk)), 16)
        padded = [torch.cat([torch.ones_like(x[:, :3]), x[:, rows]], dim=1) for x in (whole.q_HTD, whole.k_KTD, whole.v_KTD)]
        found = native.attend(call, *padded, whole_kv.layer(0), step)
        assert torch.equal(found[3:], expected[rows])
        start = end
