"""A transformers model of which a rank holds its part: built without memory, loaded in slices, joined by collectives."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from replicas.attention.registration import ATTENTION_NAME
from replicas.model_support import UnsupportedModel
from replicas.sharding.checkpoint import Checkpoint
from replicas.sharding.collectives import RankGroup
from replicas.sharding.partition import RankShare
from replicas.sharding.roles import Role
from replicas.sharding.sharding import REDUCED, ShardingPlan, features

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPart:
    """What one rank holds of a model. Prints as a line for the log."""

    kv_heads: range
    """Of every layer's."""
    tokens: range
    """Rows of the embedding and of the output projection."""
    sharded_bytes: int
    """Of parameters of which it holds its part."""
    replicated_bytes: int
    whole_sharded_bytes: int
    """Of the divided parameters, over all ranks and each once."""

    def __str__(self) -> str:
        share = self.sharded_bytes / self.whole_sharded_bytes
        mib = 2**20
        return (
            f"{(self.sharded_bytes + self.replicated_bytes) / mib:.1f} MiB of weights: {self.sharded_bytes / mib:.1f} are "
            f"{share:.2%} of {self.whole_sharded_bytes / mib:.1f} divided, {self.replicated_bytes / mib:.2f} are on every rank"
        )


def build_empty(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """The model with its shapes and buffers, but no memory for its parameters. Loading fills it in parts."""
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(f"model type {config.model_type!r} has quantised weights; set tensor_parallel_size to 1")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, attn_implementation="eager", trust_remote_code=trust_remote_code
        )
    for module in model.modules():
        buffers = {name: buffer for name, buffer in module.named_buffers(recurse=False) if name in module._non_persistent_buffers_set}
        for name, buffer in buffers.items():
            empty = float("nan") if buffer.is_floating_point() else 0
            module.register_buffer(name, torch.full_like(buffer, empty, device="cpu"), persistent=False)
        if buffers:
            model._init_weights(module)  # as transformers' own loader does for what no checkpoint holds
        if any(bool(module.get_buffer(name).isnan().any()) for name in buffers):
            raise UnsupportedModel(
                f"model type {config.model_type!r}: {type(module).__name__} does not say how to make its buffers; "
                f"set tensor_parallel_size to 1"
            )
    return model.eval().requires_grad_(False)


def load_part(
    config: Any, source: str, dtype: torch.dtype, device: torch.device, group: RankGroup, trust_remote_code: bool
) -> tuple[PreTrainedModel, LoadedPart]:
    """This rank's part of the model, whose forward pass talks to the other ranks.

    Its logits are whole on rank 0 and a part elsewhere. Raises UnsupportedModel for what cannot be divided and ValueError
    for a number of ranks that cannot divide it.
    """
    model = build_empty(config, dtype, trust_remote_code)
    plan = ShardingPlan.of(model, group.size)
    checkpoint = Checkpoint(source, model.base_model_prefix)
    share = plan.shares[group.rank]
    loaded: dict[int, Parameter] = {}  # id of the empty parameter -> loaded; tied tables are one
    sharded = replicated = whole = 0
    for name, module in list(model.named_modules()):
        slices = plan.slices(name, module, group.rank) if name in plan.roles else {}
        for key, empty in list(module.named_parameters(recurse=False)):
            if id(empty) not in loaded:
                full = f"{name}.{key}" if name else key
                part = slices.get(key)
                if part is None:
                    data = checkpoint.read(full, dtype, device)
                elif part.ranges:
                    data = checkpoint.read(full, dtype, device, part.dim, part.ranges)
                else:  # an added-up module's bias, which rank 0 has
                    data = torch.zeros(empty.shape, dtype=dtype, device=device)
                if part is None and data.shape != empty.shape:
                    raise UnsupportedModel(f"{source}: {full} has shape {tuple(data.shape)}, the model wants {tuple(empty.shape)}")
                loaded[id(empty)] = Parameter(data, requires_grad=False)
                size = data.numel() * dtype.itemsize
                if part is None or (plan.roles[name] in REDUCED and key == "bias"):
                    replicated += size
                else:
                    sharded += size
                    whole += empty.numel() * dtype.itemsize
            setattr(module, key, loaded[id(empty)])
        if name in plan.roles:
            _join(module, plan.roles[name], share, group)
        elif hasattr(module, "layer_idx") and hasattr(module, "config"):
            _localize(module, share)
    place_buffers(model, checkpoint, device)
    _load_generation_config(model, source)
    return model, LoadedPart(
        kv_heads=share.kv_heads, tokens=share.tokens, sharded_bytes=sharded, replicated_bytes=replicated, whole_sharded_bytes=whole
    )


def place_buffers(model: PreTrainedModel, checkpoint: Checkpoint, device: torch.device) -> None:
    """Moves what `build_empty` made to the device, and reads what only the checkpoint has."""
    for name, module in model.named_modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[key] = checkpoint.read(f"{name}.{key}", buffer.dtype, device) if buffer.is_meta else buffer.to(device)


def _localize(attention: Module, share: RankShare) -> None:
    """Attention modules that read sizes from themselves or their configuration see those of this rank."""
    config: Any = copy.copy(attention.config)
    config._attn_implementation = ATTENTION_NAME
    config.num_attention_heads = len(share.heads)
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = len(share.kv_heads)
    attention.config = config
    counts = {
        "num_heads": len(share.heads),
        "num_attention_heads": len(share.heads),
        "num_key_value_heads": len(share.kv_heads),
        "num_key_value_groups": len(share.heads) // len(share.kv_heads),
        "split_size": len(share.heads) * getattr(attention, "head_dim", 0),  # gpt2: the width of query, key and value each
    }
    for key, count in counts.items():
        if hasattr(attention, key):
            setattr(attention, key, count)


def _join(module: Module, role: Role, share: RankShare, group: RankGroup) -> None:
    """Sizes of the module as they are here, and what the ranks say to each other after it."""
    num_outputs, num_inputs = features(module)
    if isinstance(module, Conv1D):
        module.nf, module.nx = num_outputs, num_inputs
    elif isinstance(module, torch.nn.Linear):
        module.out_features, module.in_features = num_outputs, num_inputs
    if role in REDUCED:
        module.register_forward_hook(lambda _module, _args, output: group.all_reduce(output))
    elif role is Role.TOKENS and isinstance(module, torch.nn.Embedding):
        _join_embedding(module, share.tokens, group)
    elif role is Role.TOKENS:
        module.register_forward_hook(lambda _module, _args, output: _gathered(output, group))


def _join_embedding(module: torch.nn.Embedding, tokens: range, group: RankGroup) -> None:
    lookup = module.forward
    module.num_embeddings = len(tokens)

    def forward(token_ids: Tensor) -> Tensor:
        local_ids, is_here = localize(token_ids, tokens)
        return group.all_reduce(lookup(local_ids) * is_here[..., None])

    module.forward = forward  # type: ignore[method-assign, assignment]


def localize(token_ids: Tensor, tokens: range) -> tuple[Tensor, Tensor]:
    """Rows of a table that holds `tokens` alone, and which of them are meant: a token that is elsewhere gets some row."""
    local_ids = token_ids - tokens.start
    is_here = (local_ids >= 0) & (local_ids < len(tokens))
    return local_ids.clamp(0, len(tokens) - 1), is_here


def _gathered(output: Tensor, group: RankGroup) -> Tensor:
    """The whole vocabulary on rank 0; elsewhere this rank's part, which nobody reads."""
    whole = group.gather_last(output)
    return output if whole is None else whole


def _load_generation_config(model: PreTrainedModel, source: str) -> None:
    try:
        model.generation_config = GenerationConfig.from_pretrained(source)
    except OSError:
        logger.debug("%s has no generation config", source)
