"""Attention on CUDA through torch's variable-length kernel with block tables (FlashAttention, arXiv 2307.08691)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kvcache.spec import KVLayout
from replicas.attention.backend import LayerCall
from replicas.attention.step_tensors import StepTensors
from replicas.scheduling.step_arrays import StepArrays


class VarlenCudaAttention:
    """Attention in float16 and bfloat16, without softcap. The kernel's allowed block sizes depend on torch's build and on the device:
    torch's own FlashAttention 2 takes multiples of 256."""

    name = "varlen_cuda"
    layout = KVLayout("thd", "thd")
    is_recordable = True

    def __init__(self, varlen_attn: Callable[..., object] | None = None) -> None:
        """`varlen_attn` stands in for torch's own."""
        if varlen_attn is None:
            from torch.nn.attention.varlen import varlen_attn as from_torch  # imported only if chosen

            varlen_attn = from_torch
        self._varlen_attn = varlen_attn

    def try_out(self, call: LayerCall, dtype: torch.dtype, device: torch.device, block_size: int) -> None:
        """Runs one token through the kernel. Raises RuntimeError with a one-line reason if it does not take such blocks or heads."""
        arrays = StepArrays.with_blocks(
            token_ids_T=np.zeros(1, dtype=np.int32),
            lens_R=np.ones(1, dtype=np.int32),
            context_lens_R=np.ones(1, dtype=np.int32),
            blocks=np.zeros(1, dtype=np.int32),
            logit_rows_N=np.zeros(1, dtype=np.int32),
            block_size=block_size,
        )

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        kv = (zeros(1, block_size, call.num_kv_heads, call.k_dim), zeros(1, block_size, call.num_kv_heads, call.v_dim))
        q_HTD, k_KTD, v_KTD = (
            zeros(call.num_heads, 1, call.k_dim),
            zeros(call.num_kv_heads, 1, call.k_dim),
            zeros(call.num_kv_heads, 1, call.v_dim),
        )
        try:
            self.attend(call, q_HTD, k_KTD, v_KTD, kv, StepTensors.from_arrays(arrays).to(device))
        except (RuntimeError, ValueError, AssertionError) as error:  # torch's checks raise any of these
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RuntimeError(f"torch's kernel refuses blocks of {block_size} tokens: {said}; multiples of 256 work on any GPU") from error

    def attend(
        self,
        call: LayerCall,
        q_HTD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTD: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        step: StepTensors,
    ) -> torch.Tensor:
        k_cache, v_cache = kv
        k_cache.flatten(0, 1)[step.slots_T] = k_KTD.transpose(0, 1)
        v_cache.flatten(0, 1)[step.slots_T] = v_KTD.transpose(0, 1)
        out_THD = self._varlen_attn(
            q_HTD.transpose(0, 1).contiguous(),
            k_cache,
            v_cache,
            step.query_starts_R1,
            None,
            step.max_query_len,
            step.max_context_len,
            scale=call.scale,
            window_size=(-1 if call.window is None else call.window - 1, 0),
            enable_gqa=call.num_heads != call.num_kv_heads,
            seqused_k=step.context_lens_R,
            block_table=step.block_tables_RM,
        )
        assert isinstance(out_THD, torch.Tensor), "only a call that asks for more gets a tuple"
        return out_THD
