"""The target model as a drafting head sees it. Shapes: N rows, H the target's hidden size, V its vocabulary."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from replicas.linear.modules import method_of, stored_tensors
from replicas.model.loader import LoadedModel
from replicas.model.native_decoder import NativeDecoder
from replicas.model.runner import ModelRunner
from replicas.native.thread_team import ThreadTeam
from replicas.sharding.checkpoint import Checkpoint
from replicas.speculation.heads.head_linear import HeadLinear, HeadLinears


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTarget:
    """What heads need of the target: its sizes, its embedding and its output layer. The latter two are shared where one rank has them
    whole, and read anew from the checkpoint where ranks divide them."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    dtype: torch.dtype
    """Of weights and KV."""
    device: torch.device
    library: ctypes.CDLL | None
    """The kernels of the native runner; None with another runner."""
    team: ThreadTeam | None
    """The threads of these kernels."""
    embedding_VH: Tensor
    """In `dtype`."""
    output_rows: Callable[[Tensor], Tensor]
    """The output layer's rows [N, H] of these token ids. Works until the runner takes over the weights."""
    logits: Callable[[Tensor], Tensor]
    """float32 logits [N, V] of float32 hidden states [N, H] behind the final norm. Works once `SharedOutput` is bound."""


class SharedOutput:
    """The output layer of the target's runner, which is made after the heads."""

    def __init__(self) -> None:
        self._runner: NativeDecoder | None = None

    def bind(self, runner: ModelRunner) -> None:
        self._runner = runner if isinstance(runner, NativeDecoder) else None

    def __call__(self, hidden_NH: Tensor) -> Tensor:
        assert self._runner is not None, "the heads draft before the target's runner was made"
        return self._runner.output_logits(hidden_NH)


def head_target(loaded: LoadedModel, output: SharedOutput, team: ThreadTeam | None) -> HeadTarget:
    """`output` must be bound to the target's runner before the first draft."""
    model, config = loaded.model, loaded.choice.hf_config.get_text_config(decoder=True)
    if loaded.part is None:
        embedding_VH, output_rows = _table(model), _rows_of(model)
        logits: Callable[[Tensor], Tensor] = _module_logits(model) if loaded.native_library is None else output
    else:
        embedding_VH, whole_VH = _read_tables(loaded)
        output_rows = whole_VH.__getitem__
        logits = _own_logits(loaded, whole_VH, team)
    return HeadTarget(
        hidden_size=int(config.hidden_size),
        vocab_size=loaded.vocab_size,
        num_layers=int(config.num_hidden_layers),
        dtype=loaded.dtype,
        device=loaded.device,
        library=loaded.native_library,
        team=team,
        embedding_VH=embedding_VH,
        output_rows=output_rows,
        logits=logits,
    )


def _table(model: PreTrainedModel) -> Tensor:
    weight: Tensor = model.get_input_embeddings().weight
    return weight.detach()


def _output_module(model: PreTrainedModel) -> Module:
    module: Module = model.get_output_embeddings()
    return module


def _rows_of(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    module = _output_module(model)
    return lambda token_ids: method_of(module).weight(stored_tensors(module))[token_ids]


def _module_logits(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    module = _output_module(model)

    def logits(hidden_NH: Tensor) -> Tensor:
        found: Tensor = module(hidden_NH.to(model.dtype))
        return found.float()

    return logits


def _read_tables(loaded: LoadedModel) -> tuple[Tensor, Tensor]:
    """Embedding and output layer, whole: a rank holds only some of their rows."""
    names = {id(parameter): name for name, parameter in loaded.model.named_parameters()}
    checkpoint = Checkpoint(loaded.source, loaded.model.base_model_prefix, is_dense=not loaded.choice.is_quantized)
    embedding_VH = checkpoint.read(names[id(loaded.model.get_input_embeddings().weight)], loaded.dtype, loaded.device)
    name = names.get(id(_output_module(loaded.model).weight), "lm_head.weight")
    return embedding_VH, checkpoint.read(name, loaded.dtype, loaded.device) if checkpoint.has(name) else embedding_VH


def _own_logits(loaded: LoadedModel, whole_VH: Tensor, team: ThreadTeam | None) -> Callable[[Tensor], Tensor]:
    """Packs the output layer for the heads alone, when one of them first needs it."""
    made: list[HeadLinear] = []

    def logits(hidden_NH: Tensor) -> Tensor:
        if not made:
            linears = HeadLinears(dtype=loaded.dtype, device=loaded.device, library=loaded.native_library, team=team)
            made.append(linears.make(whole_VH))
        return made[0](hidden_NH)

    return logits
