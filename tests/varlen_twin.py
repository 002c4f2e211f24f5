"""torch's `varlen_attn` with block tables as plain tensor operations that ask the device for no value, for machines without CUDA."""

from __future__ import annotations

import torch
from torch import Tensor


def varlen_twin(
    q_THD: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
) -> Tensor:
    """As torch documents it, for causal windows: nothing behind `seqused_k` of a row counts, whatever the table or a block holds."""
    assert cu_seq_k is None
    assert window_size[1] == 0
    assert enable_gqa == (q_THD.shape[1] != k_BSKD.shape[2])
    token_T = torch.arange(q_THD.shape[0])
    row_T = torch.searchsorted(cu_seq_q[1:].contiguous(), token_T, right=True)
    position_T1 = (seqused_k[row_T] - cu_seq_q[row_T + 1] + token_T)[:, None]
    context_C = torch.arange(block_table.shape[1] * k_BSKD.shape[1])
    visible_TC = (context_C <= position_T1) & (context_C < max_k)
    if window_size[0] >= 0:
        visible_TC &= context_C >= position_T1 - window_size[0]
    group = q_THD.shape[1] // k_BSKD.shape[2]
    k_TCHD, v_TCHD = (x[block_table].flatten(1, 2)[row_T].float().repeat_interleave(group, dim=2) for x in (k_BSKD, v_BSKD))
    scores_THC = torch.einsum("thd,tchd->thc", q_THD.float(), k_TCHD) * scale
    weights_THC = scores_THC.masked_fill(~visible_TC[:, None], float("-inf")).softmax(-1)
    v_TCHD = v_TCHD.masked_fill(~visible_TC[:, :, None, None], 0.0)
    return torch.einsum("thc,tchd->thd", weights_THC, v_TCHD).to(q_THD.dtype)
