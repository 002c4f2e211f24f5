"""The contract of attention implementations. Shapes: T tokens, H query heads, K KV heads, D dimension of a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kvcache.spec import KVLayout
from replicas.attention.step_tensors import StepTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """How one layer calls attention: the shape of its KV, and the computation of its scores. Recorded from the model by a probe."""

    layer: int
    num_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int | None
    """Number of tokens that a query sees, itself included; None for all tokens up to it."""
    softcap: float | None
    """Scores become softcap * tanh(score / softcap) before the mask (Gemma 2, arXiv 2408.00118)."""


class AttentionBackend(Protocol):
    """Causal attention of a packed step over block tables. Each backend has its own KV layout."""

    name: str
    layout: KVLayout
    is_recordable: bool
    """Whether its calls read no value back from the device, so that a CUDA graph can record them."""

    def attend(
        self,
        call: LayerCall,
        q_HTD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTD: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        step: StepTensors,
    ) -> torch.Tensor:
        """Writes the step's keys and values to `step.slots_T` of `kv` (the layer's K and V), then attends.

        All writes come before any read, so requests of one step may share blocks that it fills. Returns [T, H, D].
        """
        ...
