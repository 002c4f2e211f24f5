"""Replaces the attention of transformers' models by ours. Shapes: T tokens, H query heads, K KV heads, D dimension of a head.

Importing this module registers `ATTENTION_NAME` with transformers' attention interface.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import Module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from replicas.attention.backend import LayerCall
from replicas.model_support import UnsupportedModel

ATTENTION_NAME = "manta_paged"


class LayerVisitor(Protocol):
    """Attention of one forward pass; passed to the layers through the model's keyword arguments."""

    def visit(self, module: Module, call: LayerCall, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> Tensor: ...


def _attention(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged: LayerVisitor | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """Attention with transformers' signature: query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, D]."""
    if paged is None:
        raise UnsupportedModel(f"{type(module).__name__} does not pass the step through to its attention")
    call = LayerCall(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        k_dim=key.shape[3],
        v_dim=value.shape[3],
        scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return paged.visit(module, call, query[0], key[0], value[0])[None], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
