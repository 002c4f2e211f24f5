"""The native step of one rank: each segment is compiled code, and the ranks sum their deltas between segments."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcache.tensors import KVTensors
from replicas.attention.backend import LayerCall
from replicas.attention.step_tensors import StepTensors
from replicas.model.native_decoder import SegmentedDecoder
from replicas.model.runner import StepResult
from replicas.sharding.collectives import RankGroup
from replicas.sharding.sharded_model import localize


class ShardedDecoder(SegmentedDecoder):
    """A decoder over this rank's heads, columns and tokens. Logits are complete on rank 0 and partial elsewhere."""

    def __init__(
        self,
        library: ctypes.CDLL,
        model: PreTrainedModel,
        calls: Mapping[int, LayerCall],
        kv: KVTensors,
        group: RankGroup,
        tokens: range,
        **settings: Any,
    ) -> None:
        super().__init__(library, model, calls, kv, all_reduce=group.all_reduce, **settings)
        self._group, self._tokens = group, tokens
        self._is_here_T = torch.empty(0, dtype=torch.bool)  # of the current step

    def forward(self, step: StepTensors) -> StepResult:
        local_ids_T, self._is_here_T = localize(step.token_ids_T, self._tokens)
        result = super().forward(replace(step, token_ids_T=local_ids_T))
        whole_NV = self._group.gather_last(result.logits_NV)
        return result if whole_NV is None else replace(result, logits_NV=whole_NV)

    def _add_up_embedding(self, hidden_TH: torch.Tensor) -> None:
        hidden_TH *= self._is_here_T[:, None]
        self._all_reduce(hidden_TH)
