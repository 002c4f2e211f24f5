"""What an attention implementation must offer. Letters of shapes: T tokens, H query heads, K kv heads, D dim of a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kvcache.spec import KVLayout
from replicas.attention.step_tensors import StepTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """How one layer calls attention: the shape of its KV, and how scores are made. Read off the model by a probe."""

    layer: int
    num_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int | None
    """Tokens a query sees, itself included; None for all before it."""
    softcap: float | None
    """Scores become softcap * tanh(score / softcap) before the mask (Gemma 2, arXiv 2408.00118)."""


class AttentionBackend(Protocol):
    """Causal attention of a packed step over block tables, in a KV layout of its own."""

    name: str
    layout: KVLayout
    is_recordable: bool
    """Asks the device for no value, so that a CUDA graph can hold its calls."""

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
