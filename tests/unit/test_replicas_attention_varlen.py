"""What the CUDA backend hands to torch's variable-length kernel, told on a CPU: by a twin of the kernel, and by the kernel's own checks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from replicas.attention.backend import AttentionBackend, LayerCall
from replicas.attention.reference import ReferenceAttention
from replicas.attention.step_tensors import StepTensors
from replicas.attention.varlen_cuda import VarlenCudaAttention
from replicas.scheduling.step_arrays import StepArrays
from tests.varlen_twin import varlen_twin

BLOCK_SIZE = 4
NUM_BLOCKS = 24
CALL = LayerCall(layer=0, num_heads=6, num_kv_heads=2, k_dim=8, v_dim=8, scale=8**-0.5, window=None, softcap=None)


def _step(lens: list[tuple[int, int]]) -> StepTensors:
    """Requests as pairs of tokens in this step and tokens in KV after it, their blocks in no order."""
    lens_R, context_R = (np.array(values, dtype=np.int32) for values in zip(*lens, strict=True))
    num_blocks = int((-(-context_R // BLOCK_SIZE)).sum())
    return StepTensors.from_arrays(
        StepArrays.with_blocks(
            token_ids_T=np.zeros(lens_R.sum(), dtype=np.int32),
            lens_R=lens_R,
            context_lens_R=context_R,
            blocks=np.random.default_rng(1).permutation(NUM_BLOCKS)[:num_blocks].astype(np.int32),
            logit_rows_N=np.zeros(0, dtype=np.int32),
            block_size=BLOCK_SIZE,
        )
    )


def _attend(backend: AttentionBackend, call: LayerCall, step: StepTensors) -> torch.Tensor:
    torch.manual_seed(2)
    num_tokens = len(step.token_ids_T)
    q_HTD, k_KTD, v_KTD = (torch.randn(heads, num_tokens, 8) for heads in (call.num_heads, call.num_kv_heads, call.num_kv_heads))
    kv = (torch.randn(NUM_BLOCKS, BLOCK_SIZE, 2, 8), torch.randn(NUM_BLOCKS, BLOCK_SIZE, 2, 8))
    return backend.attend(call, q_HTD, k_KTD, v_KTD, kv, step)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("lens", [[(1, 1)], [(1, 9), (1, 4), (1, 17)], [(7, 7), (1, 12), (5, 20)]])
def test_arguments_of_the_kernel_mean_what_the_reference_computes(lens: list[tuple[int, int]], window: int | None) -> None:
    call, step = replace(CALL, window=window), _step(lens)
    found, expected = _attend(VarlenCudaAttention(varlen_twin), call, step), _attend(ReferenceAttention(), call, step)
    torch.testing.assert_close(found, expected)


def test_longer_tables_and_a_greater_limit_change_nothing() -> None:
    """What a recorded step has: tables as wide as the longest request, and the limit of all requests."""
    step = _step([(1, 9), (1, 4)])
    tables_RM = torch.cat([step.block_tables_RM, torch.full((2, 3), NUM_BLOCKS - 1, dtype=torch.int32)], dim=1)
    wide = replace(step, block_tables_RM=tables_RM, max_context_len=24)
    backend = VarlenCudaAttention(varlen_twin)
    torch.testing.assert_close(_attend(backend, CALL, wide), _attend(backend, CALL, step))


def test_torch_takes_the_arguments_as_they_are_given() -> None:
    step = _step([(1, 9), (1, 4)])
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert _attend(VarlenCudaAttention(), CALL, step).shape == (2, 6, 8)


def test_try_out_is_silent_for_blocks_that_the_kernel_takes() -> None:
    VarlenCudaAttention(varlen_twin).try_out(CALL, torch.float32, torch.device("cpu"), 16)


@pytest.mark.parametrize("refusal", [RuntimeError, ValueError, AssertionError])
def test_try_out_names_the_blocks_that_the_kernel_refuses_in_one_line(refusal: type[Exception]) -> None:
    def refusing(*arguments: object, **more: object) -> None:
        raise refusal("Paged KV cache block size must be divisible by 256\nException raised from mha_varlen_fwd")

    with pytest.raises(RuntimeError, match=r"blocks of 16 tokens: Paged KV .* by 256; multiples of 256 work on any GPU$"):
        VarlenCudaAttention(refusing).try_out(CALL, torch.float32, torch.device("cpu"), 16)
