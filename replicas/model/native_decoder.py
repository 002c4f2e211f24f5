"""A llama-like decoder that runs each step as one native call. Letters: T tokens, H hidden size, N logit rows, V vocabulary,
D head dim, P positions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

import torch
from torch.nn import Module
from transformers import PreTrainedModel

from kvcache.spec import KVLayout
from kvcache.tensors import KVTensors
from replicas.attention.backend import LayerCall
from replicas.attention.step_tensors import StepTensors
from replicas.engine_config import Quantization
from replicas.linear.method import LinearMethod
from replicas.linear.modules import features, free, joined_bias, method_of, stored_tensors
from replicas.linear.packed_cache import PackedCache
from replicas.linear.quantize_at_load import QuantizeAtLoad
from replicas.model.runner import StepResult
from replicas.native.memory import HugePageMemory
from replicas.native.packing import GROUP, PackedLinear, padded
from replicas.native.structs import check_structs
from replicas.native.thread_team import ThreadTeam
from replicas.scheduling.step_arrays import HiddenRows

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
LAYOUT = KVLayout("hdt", "htd")


class Segment(IntEnum):
    """Parts of a step, numbered like `MantaSegment` in kernels.cpp."""

    EMBED = 0
    ATTENTION = 1
    MLP = 2
    LOGITS = 3


class NativeMismatch(ValueError):
    """The native step cannot run this model or gives other logits; the message says why. Another runner serves the model."""


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("panels", "units", "bias")),
        *((name, ctypes.c_int64) for name in ("num_outputs", "num_k")),
        ("element", ctypes.c_int32),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, _Linear) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("k_cache", "v_cache")),
        ("window", ctypes.c_int64),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        ("embedding", ctypes.c_void_p),
        ("final_norm", ctypes.c_void_p),
        ("lm_head", _Linear),
        ("layers", ctypes.POINTER(_Layer)),
        *(
            (name, ctypes.c_int64)
            for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "block_size")
        ),
        ("norm_eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("is_bfloat16", ctypes.c_int32),
        ("team", ctypes.c_void_p),
    ]


_STEP_POINTERS = (
    "token_ids", "positions", "slots", "logit_rows", "tables", "query_starts", "context_lens", "cos", "sin", "hidden", "delta", "normed",
    "wide", "narrow", "prepared", "logits",
)  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _STEP_POINTERS),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_requests", "table_stride", "num_logit_rows")),
    ]


def why_not_native(config: Any) -> str | None:
    """Why the native step cannot run a model, by its transformers configuration; None when it can."""
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type!r} is not one of {', '.join(sorted(FAMILIES))}"
    if config.hidden_act != "silu":
        return f"hidden_act is {config.hidden_act!r}, not 'silu'"
    if getattr(config, "mlp_bias", False):
        return "its MLP has biases"
    if (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
        return "it applies rope to only a part of each head"
    return None


def as_struct(packed: PackedLinear, hold: Callable[[torch.Tensor], int], bias: int | None = None) -> _Linear:
    """The C struct of a packed linear; `hold` keeps a tensor alive and returns its address."""
    return _Linear(
        panels=hold(packed.panels_PW),
        units=None if packed.units_N is None else hold(packed.units_N),
        bias=bias,
        num_outputs=packed.num_outputs,
        num_k=packed.num_k,
        element=packed.element,
    )


class NativeDecoder:
    """Owns the packed weights of one model and runs its steps; a ModelRunner.

    Weights and KV are float32 or bfloat16; activations and all sums are float32, so bfloat16 needs no special hardware. Kernel variants
    for CPUs that have it round activations before they multiply bfloat16 or quantized weights (`InstructionSet`). With a quantization
    the weights of all linears are integers. A row's logits are identical to the bit whatever else is in the step. The plain reference
    is `model.runner.TransformersRunner` over the weights of `LinearMethod.weight`.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        model: PreTrainedModel,
        calls: Mapping[int, LayerCall],
        kv: KVTensors,
        *,
        quantization: Quantization | None = None,
        cache: PackedCache | None = None,
        team: ThreadTeam | None = None,
        output_quantization: Quantization | None = None,
        keeps_model: bool = False,
    ) -> None:
        """Takes over the model's weights: each is packed and its original freed, so that memory is held once. `cache` keeps quantized
        weights between starts; None quantizes every time. Steps run on `team`; None makes one. `output_quantization` is that of the output
        layer, if it differs. `keeps_model` leaves the model whole, for another decoder over it."""
        config = model.config
        if reason := why_not_native(config) or _why_not_layers(calls):
            raise NativeMismatch(reason)
        check_structs(library, MantaLinear=_Linear, MantaLayer=_Layer, MantaDecoder=_Decoder, MantaStep=_Step)
        self._library = library
        self._team = team or ThreadTeam(library)
        self._kv = kv  # kept alive because the structs point into it, as into `_keep` and `_memory`
        self._keep: list[torch.Tensor] = []
        self._memory = HugePageMemory()
        self._dtype, self._quantization, self._cache, self._keeps_model = model.dtype, quantization, cache, keeps_model
        self._rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]] = model.model.rotary_emb
        self._cos_PD = self._sin_PD = _floats(0, 0)
        call = calls[0]
        embedding = model.model.embed_tokens.weight.detach()
        self._keep.append(embedding)
        self._vocab_size, _ = features(model.lm_head)
        _, intermediate_size = features(model.model.layers[0].mlp.down_proj)
        layers = (_Layer * len(calls))()
        for index, (to, layer) in enumerate(zip(layers, model.model.layers, strict=True)):
            self._fill_layer(to, f"layers.{index}", layer, calls[index], kv.layer(index))
        self._quantization = output_quantization or quantization
        lm_head = self._linear("lm_head", model.lm_head)
        if cache is not None:
            cache.save()
        self._layers = layers
        self._max_wide = max(padded(x.num_outputs) for layer in layers for x in (layer.qkv, layer.gate_up))
        self._max_narrow = max(x.num_k for layer in layers for x in (layer.out, layer.down))
        most_k = padded(max(self._max_narrow, config.hidden_size), GROUP)
        self._max_prepared = most_k + padded(most_k // GROUP) + padded(1)  # see PackedWeight::prepared_floats in packed_weight.h
        self._final_norm_H = model.model.norm.weight.detach().float().contiguous()
        self._decoder = _Decoder(
            embedding=embedding.data_ptr(),
            final_norm=self._hold(self._final_norm_H),
            lm_head=lm_head,
            layers=layers,
            num_layers=len(layers),
            hidden_size=config.hidden_size,
            num_heads=call.num_heads,
            num_kv_heads=call.num_kv_heads,
            head_dim=call.k_dim,
            intermediate_size=intermediate_size,
            block_size=kv.block_size,
            norm_eps=model.model.norm.variance_epsilon,
            scale=call.scale,
            is_bfloat16=model.dtype == torch.bfloat16,
            team=self._team.pointer,
        )

    @torch.inference_mode()
    def forward(self, step: StepTensors) -> StepResult:
        num_tokens, num_rows = step.token_ids_T.shape[0], step.logit_rows.shape[0]
        hidden_size = self._decoder.hidden_size
        self._compute_angles(step.max_context_len)
        buffers = {
            "cos": self._cos_PD,
            "sin": self._sin_PD,
            "hidden": _floats(num_tokens, hidden_size),
            "delta": _floats(num_tokens, padded(hidden_size)),
            "normed": _floats(num_tokens, hidden_size),
            "wide": _floats(num_tokens, self._max_wide),
            "narrow": _floats(num_tokens, self._max_narrow),
            "prepared": _floats(num_tokens, self._max_prepared),
            "logits": _floats(num_rows, padded(self._vocab_size)),
            "token_ids": step.token_ids_T,
            "positions": step.positions_T,
            "slots": step.slots_T,
            "logit_rows": step.logit_rows,
            "tables": step.block_tables_RM,
            "query_starts": step.query_starts_R1,
            "context_lens": step.context_lens_R,
        }
        args = _Step(
            **{name: tensor.data_ptr() for name, tensor in buffers.items()},
            num_tokens=num_tokens,
            num_requests=step.context_lens_R.shape[0],
            table_stride=step.block_tables_RM.stride(0),
            num_logit_rows=num_rows,
        )
        hidden_LKW = None
        if step.arrays.hidden is None:
            self._run(args)
        else:
            hidden_LKW = self._run_for_hidden(args, step.arrays.hidden, buffers["hidden"], buffers["delta"])
        return StepResult(logits_NV=buffers["logits"][:, : self._vocab_size], hidden_LKW=hidden_LKW)

    @torch.inference_mode()
    def output_logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """float32 logits [N, V] of float32 hidden states behind the final norm, for heads that share the output layer."""
        hidden_NH = hidden_NH.float().contiguous()
        logits = _floats(hidden_NH.shape[0], padded(self._vocab_size))
        self._library.manta_multiply(
            ctypes.c_void_p(hidden_NH.data_ptr()), ctypes.c_int64(hidden_NH.shape[0]), ctypes.byref(self._decoder.lm_head),
            ctypes.c_void_p(logits.data_ptr()), self._team.pointer,
        )  # fmt: skip
        return logits[:, : self._vocab_size]

    def _compute_angles(self, num_positions: int) -> None:
        """Extends the table of cosines and sines to at least `num_positions` positions P."""
        if num_positions > self._cos_PD.shape[0]:
            positions_1P = torch.arange(2 * num_positions)[None]
            cos_1PD, sin_1PD = self._rotary(_floats(0, 0), positions_1P)
            self._cos_PD, self._sin_PD = cos_1PD[0].contiguous(), sin_1PD[0].contiguous()

    def _run(self, step: _Step) -> None:
        """Runs the whole step as one call, during which the GIL is released."""
        self._library.manta_decoder_step(ctypes.byref(self._decoder), ctypes.byref(step))

    def _run_by_segments(self, step: _Step, between: Callable[[int], None] = lambda layer: None) -> None:
        """Runs the step segment by segment, with results identical to the bit. `between` is called with each layer's index before that
        layer and with the number of layers before the logits; the residual stream is then `hidden + delta`."""
        self._segment(step, Segment.EMBED)
        self._complete_embedding(step)
        for layer in range(self._decoder.num_layers):
            between(layer)
            for segment in (Segment.ATTENTION, Segment.MLP):
                self._segment(step, segment, layer)
                self._complete_delta(step)
        between(self._decoder.num_layers)
        self._segment(step, Segment.LOGITS)

    def _run_for_hidden(self, step: _Step, wanted: HiddenRows, hidden_TH: torch.Tensor, delta_TW: torch.Tensor) -> torch.Tensor:
        """Runs the step by segments and returns the wanted hidden states [L, K, H]."""
        rows_K = torch.from_numpy(wanted.rows_K)
        streams: dict[int, torch.Tensor] = {}  # layer -> its input [K, H]

        def between(layer: int) -> None:
            if layer in wanted.layers:
                entering_KH = hidden_TH[rows_K]
                streams[layer] = entering_KH + delta_TW[rows_K, : entering_KH.shape[1]] if layer else entering_KH

        self._run_by_segments(step, between)
        if (last := self._decoder.num_layers) in streams:
            stream_KH = streams[last]
            scale_K1 = (stream_KH.square().mean(-1, keepdim=True) + self._decoder.norm_eps).rsqrt()
            streams[last] = stream_KH * scale_K1 * self._final_norm_H
        return torch.stack([streams[layer] for layer in wanted.layers])

    def _complete_embedding(self, step: _Step) -> None:
        """Hook after the embedding, for ranks that hold a part of the table; does nothing here."""

    def _complete_delta(self, step: _Step) -> None:
        """Hook after each segment, where ranks sum the deltas [T, H rounded up to 16]; does nothing here."""

    def _segment(self, step: _Step, segment: Segment, layer: int = 0) -> None:
        self._library.manta_decoder_segment(ctypes.byref(self._decoder), ctypes.byref(step), ctypes.c_int32(segment), ctypes.c_int64(layer))

    def _fill_layer(self, to: _Layer, name: str, layer: Any, call: LayerCall, kv: tuple[torch.Tensor, torch.Tensor]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        to.input_norm = self._floats(layer.input_layernorm.weight)
        to.post_norm = self._floats(layer.post_attention_layernorm.weight)
        if hasattr(attention, "q_norm"):
            to.q_norm, to.k_norm = self._floats(attention.q_norm.weight), self._floats(attention.k_norm.weight)
        to.qkv = self._linear(f"{name}.qkv", attention.q_proj, attention.k_proj, attention.v_proj)
        to.out = self._linear(f"{name}.out", attention.o_proj)
        to.gate_up = self._linear(f"{name}.gate_up", mlp.gate_proj, mlp.up_proj)
        to.down = self._linear(f"{name}.down", mlp.down_proj)
        to.k_cache, to.v_cache = kv[0].data_ptr(), kv[1].data_ptr()
        to.window = call.window or 0

    def _linear(self, name: str, *modules: Module) -> _Linear:
        """Packs the modules as one linear, their outputs in order, and takes over their weights."""
        stored, *others = {method_of(module) for module in modules}
        if others:
            raise NativeMismatch(f"{name} joins linears of different formats")
        method: LinearMethod = stored
        if self._quantization is not None:
            method = QuantizeAtLoad(stored=stored, quantization=self._quantization, cache=self._cache)
        packed = method.pack(name, [stored_tensors(module) for module in modules], self._dtype)
        bias_N = joined_bias(modules)
        linear = as_struct(packed, self._hold, None if bias_N is None else self._floats(bias_N))
        if not self._keeps_model:
            for module in modules:
                free(module)
        return linear

    def _floats(self, tensor: torch.Tensor) -> int:
        return self._hold(tensor.detach().float().contiguous())

    def _hold(self, tensor: torch.Tensor) -> int:
        held = self._memory.copy(tensor)
        self._keep.append(held)
        return held.data_ptr()


class SegmentedDecoder(NativeDecoder):
    """The same step, always segment by segment, with a hook where ranks sum their deltas.

    `all_reduce` gets the delta [T, H rounded up to 16] of each segment and adds the other ranks' deltas in place.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        model: PreTrainedModel,
        calls: Mapping[int, LayerCall],
        kv: KVTensors,
        all_reduce: Callable[[torch.Tensor], object] = lambda delta: None,
        **settings: Any,
    ) -> None:
        super().__init__(library, model, calls, kv, **settings)
        self._all_reduce = all_reduce
        self._delta_TW = torch.empty(0)  # of the current step

    def _run(self, step: _Step) -> None:
        self._run_by_segments(step)

    def _complete_embedding(self, step: _Step) -> None:
        self._delta_TW = _floats_at(step.delta, step.num_tokens, padded(self._decoder.hidden_size))
        self._add_up_embedding(_floats_at(step.hidden, step.num_tokens, self._decoder.hidden_size))

    def _add_up_embedding(self, hidden_TH: torch.Tensor) -> None:
        """Hook for ranks that hold a part of the table; does nothing here."""

    def _complete_delta(self, step: _Step) -> None:
        self._all_reduce(self._delta_TW)


def _why_not_layers(calls: Mapping[int, LayerCall]) -> str | None:
    shapes = {(call.num_heads, call.num_kv_heads, call.k_dim, call.v_dim, call.scale) for call in calls.values()}
    if len(shapes) > 1:
        return "its layers differ in shape"
    if any(call.softcap is not None for call in calls.values()):
        return "it caps attention scores"
    return "its keys and values differ in size" if calls[0].k_dim != calls[0].v_dim else None


def _floats(num_rows: int, width: int) -> torch.Tensor:
    """Uninitialized float32 memory, whatever torch's default dtype is: the kernels write floats."""
    return torch.empty(num_rows, width, dtype=torch.float32)


def _floats_at(address: int, num_rows: int, width: int) -> torch.Tensor:
    memory = (ctypes.c_float * (num_rows * width)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32).view(num_rows, width)
