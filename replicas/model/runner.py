"""Runs a packed step through a model. Letters of shapes: T tokens, N logit rows, V vocabulary; L layers, K rows and W width of hidden
states; in attention H query heads, K kv heads, D dim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from kvcache.spec import KVGroupSpec
from kvcache.tensors import KVTensors
from replicas.attention.backend import AttentionBackend, LayerCall
from replicas.attention.reference import attend_one
from replicas.attention.registration import ATTENTION_NAME
from replicas.attention.step_tensors import StepTensors
from replicas.model_support import UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The results of a step, apart from KV. The next step may overwrite the logits."""

    logits_NV: Tensor
    """float32 logits of the rows in `step.logit_rows`."""
    hidden_LKW: Tensor | None = None
    """float32 hidden states of the layers and rows in the step's `hidden`; None when it asks for none."""
    is_graphed: bool = False
    """Whether a recorded CUDA graph was replayed."""


class ModelRunner(Protocol):
    """The engine's interface to a model. Faster runners for common families implement the same contract."""

    def forward(self, step: StepTensors) -> StepResult:
        """Writes the step's KV and returns its results. The step's tensors are on the host."""
        ...


class _Recorder:
    """Records how each layer calls attention, and answers with plain attention over the given tokens only."""

    def __init__(self) -> None:
        self.calls: dict[int, LayerCall] = {}  # layer index -> call
        self._modules: dict[int, Module] = {}

    def visit(self, module: Module, call: LayerCall, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> Tensor:
        if self._modules.setdefault(call.layer, module) is not module:
            raise UnsupportedModel(f"two attention modules share layer index {call.layer}")
        self.calls[call.layer] = call
        return attend_one(call, q_HTD, k_KTD.transpose(0, 1), v_KTD.transpose(0, 1))


class _PagedStep:
    """Answers the attention calls of one step from the KV tensors."""

    def __init__(self, backend: AttentionBackend, kv: KVTensors, step: StepTensors) -> None:
        self._backend, self._kv, self._step = backend, kv, step

    def visit(self, module: Module, call: LayerCall, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> Tensor:
        return self._backend.attend(call, q_HTD, k_KTD, v_KTD, self._kv.layer(call.layer), self._step)


class TransformersRunner:
    """Runs any causal language model of transformers with its attention replaced by ours."""

    def __init__(self, model: PreTrainedModel, backend: AttentionBackend, kv: KVTensors) -> None:
        model.set_attn_implementation(ATTENTION_NAME)
        self._model, self._backend, self._kv = model, backend, kv

    @torch.inference_mode()
    def forward(self, step: StepTensors) -> StepResult:
        step = step.to(self._kv.device)
        visitor = _PagedStep(self._backend, self._kv, step)
        wanted = step.arrays.hidden
        asked = {} if wanted is None else {"output_hidden_states": True}
        output = _run(self._model, step.token_ids_T, step.positions_T, step.logit_rows, paged=visitor, **asked)
        hidden_LKW = None
        if wanted is not None:
            rows_K = torch.from_numpy(wanted.rows_K).to(self._kv.device)
            hidden_LKW = torch.stack([output.hidden_states[layer][0, rows_K] for layer in wanted.layers]).float()
        return StepResult(logits_NV=output.logits[0].float(), hidden_LKW=hidden_LKW)


@torch.inference_mode()
def probe_layers(model: PreTrainedModel, num_tokens: int = 2) -> Mapping[int, LayerCall]:
    """How each layer calls attention, found by running a few tokens. The model uses our attention afterwards.

    Raises UnsupportedModel when some layer never calls it (a state-space or linear-attention layer).
    """
    model.set_attn_implementation(ATTENTION_NAME)
    recorder = _Recorder()
    tokens = torch.arange(num_tokens, device=model.device)
    _logits(model, tokens.new_zeros(num_tokens), tokens, tokens[-1:], paged=recorder)
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if missing := sorted(set(range(num_layers)) - recorder.calls.keys()):
        raise UnsupportedModel(f"model type {model.config.model_type!r}: layers {missing} do not call attention with a KV cache")
    return recorder.calls


def kv_groups(calls: Mapping[int, LayerCall]) -> tuple[KVGroupSpec, ...]:
    """Groups of layers with the same KV shape and window."""
    layers: dict[tuple[int | None, int, int, int], list[int]] = {}
    for layer, call in sorted(calls.items()):
        layers.setdefault((call.window, call.num_kv_heads, call.k_dim, call.v_dim), []).append(layer)
    return tuple(
        KVGroupSpec(
            layers=tuple(members), kind="full" if window is None else "window", window=window, num_kv_heads=heads, k_dim=k_dim, v_dim=v_dim
        )
        for (window, heads, k_dim, v_dim), members in layers.items()
    )


@torch.inference_mode()
def transformers_logits(model: PreTrainedModel, token_ids_T: Tensor) -> Tensor:
    """Logits [T, V] of one whole sequence by the model's own attention: the independent reference of the self-check."""
    model.set_attn_implementation("eager")
    positions_T = torch.arange(token_ids_T.shape[0], device=token_ids_T.device)
    try:
        return _logits(model, token_ids_T, positions_T, positions_T)
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _logits(model: PreTrainedModel, token_ids_T: Tensor, positions_T: Tensor, rows_N: Tensor, **kwargs: Any) -> Tensor:
    logits: Tensor = _run(model, token_ids_T, positions_T, rows_N, **kwargs).logits[0]
    return logits.float()


def _run(model: PreTrainedModel, token_ids_T: Tensor, positions_T: Tensor, rows_N: Tensor, **kwargs: Any) -> Any:
    return model(input_ids=token_ids_T[None], position_ids=positions_T[None], use_cache=False, logits_to_keep=rows_N, **kwargs)
