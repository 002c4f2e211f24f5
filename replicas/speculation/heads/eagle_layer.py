"""Computes an EAGLE head: one decoder layer over the target's hidden states. Shapes: T packed rows, L hidden states that are read, W the
target's hidden size, H the head's, C token ids that it drafts; in attention Q query heads, G KV heads, D dim."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvcache.spec import KVGroupSpec
from kvcache.tensors import KVTensors
from replicas.attention.backend import AttentionBackend, LayerCall
from replicas.attention.step_tensors import StepTensors
from replicas.speculation.heads.eagle_files import EagleWeights
from replicas.speculation.heads.eagle_settings import EagleSettings
from replicas.speculation.heads.head_linear import HeadLinears
from replicas.speculation.heads.target import HeadTarget


class EagleLayer:
    """The head of one target; its KV is the caller's. Must be made before the target's runner takes over its weights.

    The row of position t reads the target's hidden states of position t and the token at t + 1, and predicts the token at t + 2.
    In EAGLE-1 `fc` joins both to the layer's input; in EAGLE-3 it joins three hidden states, and the attention reads the token beside.
    """

    def __init__(self, weights: EagleWeights, target: HeadTarget) -> None:
        self.settings = settings = weights.settings
        linears = HeadLinears(dtype=target.dtype, device=target.device, library=target.library, team=target.team)

        def floats(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(target.device, torch.float32)

        self._fc, self._qkv, self._out = linears.make(*weights.fc), linears.make(*weights.qkv), linears.make(*weights.out)
        self._gate_up, self._down = linears.make(*weights.gate_up), linears.make(*weights.down)
        self._input_norm_H, self._hidden_norm_H = floats(weights.input_norm_H), floats(weights.hidden_norm_H)
        self._post_norm_H, self._final_norm_H = weights.post_norm_H.to(target.device, torch.float32), floats(weights.final_norm_H)
        self._q_norm_D, self._k_norm_D = floats(weights.q_norm_D), floats(weights.k_norm_D)
        self._fc_norms = [norm.to(target.device, torch.float32) for norm in weights.fc_norms]
        self._embedding_VH = _shared(weights.embedding_VH, target)
        self.token_ids_C = None if weights.token_ids_C is None else weights.token_ids_C.to(target.device)
        if weights.output_CH is not None:
            self._output: Callable[[Tensor], Tensor] = linears.make(weights.output_CH)
        elif self.token_ids_C is not None:
            self._output = linears.make(target.output_rows(self.token_ids_C))
        else:
            self._output = target.logits
        self._rotary = _rotary(settings).to(target.device)
        self._dtype = target.dtype
        self.num_bytes = linears.num_bytes
        if self._embedding_VH is not target.embedding_VH:
            self.num_bytes += self._embedding_VH.numel() * self._embedding_VH.element_size()
        self.call = LayerCall(
            layer=0,
            num_heads=settings.num_heads,
            num_kv_heads=settings.num_kv_heads,
            k_dim=settings.head_dim,
            v_dim=settings.head_dim,
            scale=settings.head_dim**-0.5,
            window=settings.window,
            softcap=None,
        )

    def fused(self, hidden_LTW: Tensor) -> Tensor:
        """What the head keeps of the target's hidden states of each position [T, H]."""
        if not self.settings.is_eagle3:
            return hidden_LTW[0]
        parts = list(hidden_LTW)
        if self.settings.fc_norm:
            parts = [self._norm(part_TW, norm_W) for part_TW, norm_W in zip(parts, self._fc_norms, strict=True)]
        joined = torch.cat(parts, dim=-1)
        if self.settings.norm_before_fc:
            joined = self._norm(joined, self._fc_norms[0])
        return self._fc(joined)

    def forward(
        self, token_ids_T: Tensor, state_TH: Tensor, positions_T: Tensor, step: StepTensors, backend: AttentionBackend, kv: KVTensors
    ) -> Tensor:
        """The head's states [T, H] behind its layer. `state_TH` is `fused` of the target's hidden states, or `recycled` of earlier
        results; `token_ids_T` are the tokens that follow. Writes KV to the slots of `step`, whose contexts may leave out positions."""
        embedding_TH = self._embedding_VH[token_ids_T].float()
        if self._input_norm_H is None or self._hidden_norm_H is None:
            residual_TH = attended = self._fc(torch.cat([embedding_TH, state_TH], dim=-1))
        else:
            normed_TH = self._norm(state_TH, self._hidden_norm_H)
            residual_TH = normed_TH if self.settings.norm_before_residual else state_TH
            attended = torch.cat([self._norm(embedding_TH, self._input_norm_H), normed_TH], dim=-1)
        residual_TH = residual_TH + self._out(self._attend(self._qkv(attended), positions_T, step, backend, kv))
        gate_T, up_T = self._gate_up(self._norm(residual_TH, self._post_norm_H)).chunk(2, dim=-1)
        return residual_TH + self._down(silu(gate_T) * up_T)

    def logits(self, out_TH: Tensor) -> Tensor:
        """Logits [T, C] of the tokens two places behind each position."""
        return self._output(out_TH if self._final_norm_H is None else self._norm(out_TH, self._final_norm_H))

    def recycled(self, out_TH: Tensor) -> Tensor:
        """The input of the next row in place of the target's hidden states, which nobody has computed yet."""
        return self._norm(out_TH, self._final_norm_H) if self.settings.norm_output and self._final_norm_H is not None else out_TH

    def _attend(self, qkv: Tensor, positions_T: Tensor, step: StepTensors, backend: AttentionBackend, kv: KVTensors) -> Tensor:
        settings, num_tokens = self.settings, qkv.shape[0]
        heads_TAD = qkv.reshape(num_tokens, -1, settings.head_dim)
        num_rotated = settings.num_heads + settings.num_kv_heads
        q_TQD, k_TGD, v_TGD = heads_TAD.tensor_split((settings.num_heads, num_rotated), dim=1)
        if self._q_norm_D is not None:
            q_TQD = self._norm(q_TQD, self._q_norm_D)
        if self._k_norm_D is not None:
            k_TGD = self._norm(k_TGD, self._k_norm_D)
        cos_1TD, sin_1TD = self._rotary(qkv, positions_T[None])
        q_TQD, k_TGD = (_rotated(x, cos_1TD[0, :, None], sin_1TD[0, :, None]) for x in (q_TQD, k_TGD))
        q_QTD, k_GTD, v_GTD = (x.transpose(0, 1).to(self._dtype) for x in (q_TQD, k_TGD, v_TGD))
        return backend.attend(self.call, q_QTD, k_GTD, v_GTD, kv.layer(0), step).float().flatten(1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm (arXiv 1910.07467)."""
        return weight * (x * (x.square().mean(-1, keepdim=True) + self.settings.norm_eps).rsqrt())


def kv_group(settings: EagleSettings) -> KVGroupSpec:
    """The head's KV: one layer."""
    return KVGroupSpec(
        layers=(0,),
        kind="full" if settings.window is None else "window",
        window=settings.window,
        num_kv_heads=settings.num_kv_heads,
        k_dim=settings.head_dim,
        v_dim=settings.head_dim,
    )


def _shared(embedding_VH: Tensor | None, target: HeadTarget) -> Tensor:
    """The target's embedding also where the file has a copy of it."""
    if embedding_VH is None:
        return target.embedding_VH
    embedding_VH = embedding_VH.to(target.device, target.dtype)
    return target.embedding_VH if torch.equal(embedding_VH, target.embedding_VH) else embedding_VH


def _rotary(settings: EagleSettings) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=settings.hidden_size,
        num_attention_heads=settings.num_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.max_positions,
        rope_parameters=dict(settings.rope_parameters),
    )
    return LlamaRotaryEmbedding(config)


def _rotated(x_TAD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotary position embedding in the half-split order of llama checkpoints."""
    low, high = x_TAD.chunk(2, dim=-1)
    return x_TAD * cos_T1D + torch.cat([-high, low], dim=-1) * sin_T1D
