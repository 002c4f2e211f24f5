"""Attention over block tables in plain torch, for any device and dtype: readable, and the reference in tests."""

from __future__ import annotations

import torch

from kvcache.spec import KVLayout
from replicas.attention.backend import LayerCall
from replicas.attention.step_tensors import StepTensors


class ReferenceAttention:
    """Computes one request after the other on its gathered blocks; scores and softmax are float32."""

    name = "reference"
    layout = KVLayout("thd", "thd")
    is_recordable = False

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
        block_size = k_cache.shape[1]
        out_THD = q_HTD.new_empty(q_HTD.shape[1], call.num_heads, call.v_dim)
        starts, contexts = step.query_starts_R1.tolist(), step.context_lens_R.tolist()
        for request, context_len in enumerate(contexts):
            rows = slice(starts[request], starts[request + 1])
            table = step.block_tables_RM[request, : -(-context_len // block_size)]
            k_CKD = k_cache[table].flatten(0, 1)[:context_len]
            v_CKD = v_cache[table].flatten(0, 1)[:context_len]
            out_THD[rows] = attend_one(call, q_HTD[:, rows], k_CKD, v_CKD)
        return out_THD


def attend_one(call: LayerCall, q_HTD: torch.Tensor, k_CKD: torch.Tensor, v_CKD: torch.Tensor) -> torch.Tensor:
    """Attention of one request's T newest tokens over its context of C tokens, which includes them. Returns [T, H, D]."""
    num_new, context_len = q_HTD.shape[1], k_CKD.shape[0]
    group = call.num_heads // call.num_kv_heads
    q_KGTD = q_HTD.float().reshape(call.num_kv_heads, group, num_new, call.k_dim)
    scores = torch.einsum("kgtd,ckd->kgtc", q_KGTD, k_CKD.float()) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    position_T1 = torch.arange(context_len - num_new, context_len, device=q_HTD.device)[:, None]
    position_C = torch.arange(context_len, device=q_HTD.device)
    visible_TC = position_C <= position_T1
    if call.window is not None:
        visible_TC &= position_C > position_T1 - call.window
    weights = scores.masked_fill(~visible_TC, float("-inf")).softmax(dim=-1)
    return torch.einsum("kgtc,ckd->tkgd", weights, v_CKD.float()).flatten(1, 2).to(q_HTD.dtype)
