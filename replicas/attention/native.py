"""Attention on a CPU through the compiled kernel: one call per layer, which reads the blocks in place."""

from __future__ import annotations

import ctypes

import torch

from kvcache.spec import KVLayout
from replicas.attention.backend import LayerCall
from replicas.attention.step_tensors import StepTensors
from replicas.native.structs import check_structs
from replicas.native.thread_team import ThreadTeam

_POINTERS = ("query", "key", "value", "out", "k_cache", "v_cache", "tables", "query_starts", "context_lens", "slots")
_SIZES = (
    "num_tokens", "num_requests", "table_stride", "num_heads", "num_kv_heads", "k_dim", "v_dim", "block_size",
    "q_token_stride", "q_head_stride", "k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride", "window",
)  # fmt: skip


class _Args(ctypes.Structure):
    """Mirrors MantaAttentionArgs in replicas/native/kernels.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("is_bfloat16", ctypes.c_int32),
        ("team", ctypes.c_void_p),
    ]


class NativeAttention:
    """Attention in float32 and bfloat16 on x86 or ARM; reference.py has the torch version."""

    name = "native"
    layout = KVLayout("hdt", "htd")
    is_recordable = False

    def __init__(self, library: ctypes.CDLL, team: ThreadTeam | None = None) -> None:
        """Works on `team`; None makes one."""
        check_structs(library, MantaAttentionArgs=_Args)
        self._team = team or ThreadTeam(library)
        self._call = library.manta_paged_attention
        self._call.argtypes, self._call.restype = [ctypes.POINTER(_Args)], None

    def attend(
        self,
        call: LayerCall,
        q_HTD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTD: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        step: StepTensors,
    ) -> torch.Tensor:
        q_HTD, k_KTD, v_KTD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_HTD, k_KTD, v_KTD))
        k_cache, v_cache = kv
        out_THD = q_HTD.new_empty(q_HTD.shape[1], call.num_heads, call.v_dim)
        args = _Args(
            query=q_HTD.data_ptr(),
            key=k_KTD.data_ptr(),
            value=v_KTD.data_ptr(),
            out=out_THD.data_ptr(),
            k_cache=k_cache.data_ptr(),
            v_cache=v_cache.data_ptr(),
            tables=step.block_tables_RM.data_ptr(),
            query_starts=step.query_starts_R1.data_ptr(),
            context_lens=step.context_lens_R.data_ptr(),
            slots=step.slots_T.data_ptr(),
            num_tokens=q_HTD.shape[1],
            num_requests=step.context_lens_R.shape[0],
            table_stride=step.block_tables_RM.stride(0),
            num_heads=call.num_heads,
            num_kv_heads=call.num_kv_heads,
            k_dim=call.k_dim,
            v_dim=call.v_dim,
            block_size=v_cache.shape[2],
            q_token_stride=q_HTD.stride(1),
            q_head_stride=q_HTD.stride(0),
            k_token_stride=k_KTD.stride(1),
            k_head_stride=k_KTD.stride(0),
            v_token_stride=v_KTD.stride(1),
            v_head_stride=v_KTD.stride(0),
            window=call.window or 0,
            scale=call.scale,
            softcap=call.softcap or 0.0,
            team=self._team.pointer,
            is_bfloat16=q_HTD.dtype == torch.bfloat16,
        )
        self._call(ctypes.byref(args))
        return out_THD
