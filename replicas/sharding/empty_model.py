"""A transformers model without memory for its parameters, and the loading that fills it, whole or in slices."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import Linear, Parameter
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from replicas.linear.division import ParameterSlice
from replicas.linear.formats import Format, stored_format
from replicas.linear.modules import StoredLinear
from replicas.model_support import UnsupportedModel
from replicas.sharding.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


def build_empty(config: Any, source: str, dtype: torch.dtype, trust_remote_code: bool) -> tuple[PreTrainedModel, Checkpoint]:
    """The model with its shapes and buffers but without memory for its parameters, and the checkpoint to fill it from. Linears are
    modules of the checkpoint's format. A dense checkpoint is not opened yet."""
    stored = stored_format(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, attn_implementation="eager", trust_remote_code=trust_remote_code
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # some families create a few in float32, whatever `dtype` is
    for module in model.modules():
        buffers = {name: buffer for name, buffer in module.named_buffers(recurse=False) if name in module._non_persistent_buffers_set}
        for name, buffer in buffers.items():
            empty = float("nan") if buffer.is_floating_point() else 0
            module.register_buffer(name, torch.full_like(buffer, empty, device="cpu"), persistent=False)
        if buffers:
            model._init_weights(module)  # transformers' own loader does the same for tensors that no checkpoint holds
        if any(bool(module.get_buffer(name).isnan().any()) for name in buffers):
            raise UnsupportedModel(
                f"model type {config.model_type!r}: {type(module).__name__} does not say how to make its buffers; "
                f"{'set tensor_parallel_size to 1' if stored is None else 'load the unquantized checkpoint'}"
            )
    checkpoint = Checkpoint(source, model.base_model_prefix, is_dense=stored is None)
    if stored is not None:
        _store(model, checkpoint, stored)
    return model.eval().requires_grad_(False), checkpoint


def _store(model: PreTrainedModel, checkpoint: Checkpoint, stored: Format) -> None:
    """Replaces each linear that the checkpoint stores in this format by a module of the format."""
    for name, module in list(model.named_modules()):
        if not isinstance(module, Linear | Conv1D):
            continue
        method = stored(name, partial(_has, checkpoint, name))
        if method is not None:
            try:
                model.set_submodule(name, StoredLinear(method, module))
            except ValueError as error:
                raise UnsupportedModel(f"model type {model.config.model_type!r}: {name}: {error}") from error


def _has(checkpoint: Checkpoint, module_name: str, tensor_name: str) -> bool:
    return checkpoint.has(f"{module_name}.{tensor_name}")


def fill(model: PreTrainedModel, checkpoint: Checkpoint, device: torch.device, slices: Mapping[str, ParameterSlice]) -> None:
    """Reads every parameter, or its slice from `slices` (parameter name -> slice), and the generation config. Tied parameters stay
    tied."""
    loaded: dict[int, Parameter] = {}  # id of the empty parameter -> loaded
    for name, module in model.named_modules():
        for key, empty in list(module.named_parameters(recurse=False)):
            if id(empty) not in loaded:
                full = f"{name}.{key}" if name else key
                loaded[id(empty)] = read_parameter(checkpoint, full, empty, device, slices.get(full))
            setattr(module, key, loaded[id(empty)])
    place_buffers(model, checkpoint, device)
    try:
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.source)
    except OSError:
        logger.debug("%s has no generation config", checkpoint.source)


def read_parameter(
    checkpoint: Checkpoint, name: str, empty: torch.Tensor, device: torch.device, part: ParameterSlice | None = None
) -> Parameter:
    """A parameter's values, or a slice of them, from the checkpoint. Raises UnsupportedModel when its shape there differs."""
    if part is not None and not part.ranges:
        return Parameter(torch.zeros(empty.shape, dtype=empty.dtype, device=device), requires_grad=False)
    shape = checkpoint.shape(name)
    if empty.numel() > 0 and shape != tuple(empty.shape):
        raise UnsupportedModel(f"{checkpoint.source}: {name} has shape {shape}, the model wants {tuple(empty.shape)}")
    dim, ranges = (0, None) if part is None else (part.dim, part.ranges)
    return Parameter(checkpoint.read(name, empty.dtype, device, dim, ranges), requires_grad=False)


def place_buffers(model: PreTrainedModel, checkpoint: Checkpoint, device: torch.device) -> None:
    """Moves the buffers that `build_empty` made to the device; buffers that it could not make are read from the checkpoint."""
    for name, module in model.named_modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[key] = checkpoint.read(f"{name}.{key}", buffer.dtype, device) if buffer.is_meta else buffer.to(device)
