"""An EAGLE head in plain float64: the whole sequence anew for each draft, without a cache. The formulas are those of the authors' code.

Tensors are named as in the authors' files. Shapes: T rows, W hidden size of the target, H of the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


class EagleReference:
    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any], embedding_VH: Tensor, output_VH: Tensor) -> None:
        """`config` has the head's own keys on top level; `embedding_VH` and `output_VH` are the target's."""
        self._t = {name.replace("midlayer.", "layers.0."): t.double() if t.is_floating_point() else t for name, t in tensors.items()}
        self._config = config
        self._embedding = self._t.get("embed_tokens.weight", embedding_VH.double())
        self._output = self._t.get("lm_head.weight", output_VH.double())
        self.is_eagle3 = "layers.0.hidden_norm.weight" in self._t

    def fused(self, hidden_LTW: Tensor) -> Tensor:
        if not self.is_eagle3:
            return hidden_LTW[0].double()
        parts = list(hidden_LTW.double())
        if self._config.get("fc_norm"):
            parts = [self._norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)]
        joined = torch.cat(parts, -1)
        if self._config.get("norm_before_fc"):
            joined = self._norm(joined, "input_norm.weight")
        return self._linear(joined, "fc")

    def outputs(self, token_ids: list[int], states_TH: Tensor, first: int = 0) -> Tensor:
        """Rows of positions 0, 1, ...: `token_ids` follow them. Attention sees the rows from `first` on."""
        e = self._embedding[torch.tensor(token_ids)]
        if self.is_eagle3:
            hidden = self._norm(states_TH, "layers.0.hidden_norm.weight")
            residual = hidden if self._config.get("norm_before_residual") else states_TH
            x = torch.cat([self._norm(e, "layers.0.input_layernorm.weight"), hidden], -1)
        else:
            residual = x = self._linear(torch.cat([e, states_TH], -1), "fc")
        residual = residual + self._linear(self._attention(x, first), "layers.0.self_attn.o_proj")
        normed = self._norm(residual, "layers.0.post_attention_layernorm.weight")
        gate, up = self._linear(normed, "layers.0.mlp.gate_proj"), self._linear(normed, "layers.0.mlp.up_proj")
        return residual + self._linear(silu(gate) * up, "layers.0.mlp.down_proj")

    def logits(self, out_TH: Tensor) -> Tensor:
        """Over the head's own ids."""
        return (self._norm(out_TH, "norm.weight") if self.is_eagle3 else out_TH) @ self._output.T

    def drafts(self, token_ids: list[int], hidden_LTW: Tensor, num_drafts: int) -> list[int]:
        """Greedy drafts behind `token_ids`; `hidden_LTW` are the target's of all positions but the newest."""
        states = self.fused(hidden_LTW)
        followers, drafted = list(token_ids[1:]), []
        for _ in range(num_drafts):
            out = self.outputs(followers, states)[-1:]
            own_id = int(self.logits(out)[0].argmax())
            token_id = own_id + int(self._t["d2t"][own_id]) if "d2t" in self._t else own_id
            drafted.append(token_id)
            followers.append(token_id)
            states = torch.cat([states, self._norm(out, "norm.weight") if self._config.get("norm_output") else out])
        return drafted

    def _attention(self, x: Tensor, first: int) -> Tensor:
        config, num_rows = self._config, x.shape[0]
        num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        q, k, v = (self._linear(x, f"layers.0.self_attn.{name}_proj") for name in "qkv")
        q, k, v = q.view(num_rows, num_heads, -1), k.view(num_rows, num_kv_heads, -1), v.view(num_rows, num_kv_heads, -1)
        if "layers.0.self_attn.q_norm.weight" in self._t:
            q, k = self._norm(q, "layers.0.self_attn.q_norm.weight"), self._norm(k, "layers.0.self_attn.k_norm.weight")
        q, k = self._turned(q), self._turned(k)
        out = torch.zeros_like(q)
        for row in range(first, num_rows):
            for head in range(num_heads):
                kv = head // (num_heads // num_kv_heads)
                scores = (k[first : row + 1, kv] @ q[row, head]) / q.shape[-1] ** 0.5
                out[row, head] = scores.softmax(-1) @ v[first : row + 1, kv]
        return out.flatten(1)

    def _turned(self, x: Tensor) -> Tensor:
        """Each pair (i, i + dim / 2), as a complex number, turned by position * theta^(-2i / dim)."""
        half = x.shape[-1] // 2
        frequencies = self._config.get("rope_theta", 10000.0) ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * frequencies
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"]).sqrt() * self._t[name]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = self._t.get(f"{name}.bias")
        out = x @ self._t[f"{name}.weight"].T
        return out if bias is None else out + bias
