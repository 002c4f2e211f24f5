"""transformers' own logits of a model too large for one rank: each layer is read when it runs and dropped afterwards."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import Module, ModuleList
from transformers import PreTrainedModel

from replicas.model.loader import ModelChoice
from replicas.model.runner import transformers_logits
from replicas.sharding.checkpoint import Checkpoint
from replicas.sharding.empty_model import build_empty, place_buffers, read_parameter


def streamed_logits(choice: ModelChoice, token_ids_T: Tensor) -> Tensor:
    """Logits [T, V] of one whole sequence by undivided transformers modules. Holds at most one layer's weights at a time."""
    model, checkpoint = build_empty(choice.hf_config, choice.source, choice.dtype, choice.trust_remote_code)
    place_buffers(model, checkpoint, choice.device)
    for unit in _units(model):
        _stream(unit, model, checkpoint, choice.device)
    return transformers_logits(model, token_ids_T)


def _units(model: PreTrainedModel) -> list[Module]:
    """Modules that are read as a whole: the entries of module lists (decoder layers), and other modules with parameters of their own."""
    layers = [entry for module in model.modules() if isinstance(module, ModuleList) for entry in module]
    inside = {id(module) for layer in layers for module in layer.modules()}
    nested = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    others = [module for module in model.modules() if id(module) not in inside and list(module.parameters(recurse=False))]
    return [*(layer for layer in layers if id(layer) not in nested), *others]


def _stream(unit: Module, model: PreTrainedModel, checkpoint: Checkpoint, device: torch.device) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places = [
        (module, key, names[id(parameter)], parameter)
        for module in unit.modules()
        for key, parameter in module.named_parameters(recurse=False)
    ]

    def read(*_: object) -> None:
        for module, key, name, empty in places:
            setattr(module, key, read_parameter(checkpoint, name, empty, device))

    def drop(*_: object) -> None:
        for module, key, _name, empty in places:
            setattr(module, key, empty)

    unit.register_forward_pre_hook(read)
    unit.register_forward_hook(drop)


def checkpoint_values(choice: ModelChoice, count: int) -> list[tuple[str, tuple[int, ...], Tensor]]:
    """Name, shape and first `count` values of every parameter, in order of names, equal to those of the whole model."""
    model, checkpoint = build_empty(choice.hf_config, choice.source, choice.dtype, choice.trust_remote_code)
    found = []
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        shape = checkpoint.shape(name)
        rows = [range(min(-(-count // max(1, math.prod(shape[1:]))), shape[0]))] if shape else None
        first = checkpoint.read(name, parameter.dtype, torch.device("cpu"), 0, rows)
        found.append((name, shape, first.flatten()[:count]))
    return found
