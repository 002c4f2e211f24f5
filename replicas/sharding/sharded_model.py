"""One rank's part of a transformers model: loaded in slices, joined to the other ranks by collectives."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from replicas.attention.registration import ATTENTION_NAME
from replicas.linear.division import divide, part_sizes
from replicas.linear.modules import resize
from replicas.sharding.collectives import RankGroup
from replicas.sharding.empty_model import build_empty, fill
from replicas.sharding.partition import RankShare
from replicas.sharding.sharding import REDUCED, ShardingPlan
from replicas.sharding.styles import ShardingStyle


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPart:
    """What one rank holds of a model. `str` gives a line for the log."""

    kv_heads: range
    """The same in every layer."""
    tokens: range
    """Token ids whose rows of the embedding and of the output projection this rank holds."""
    sharded_bytes: int
    """Bytes of this rank's parts of divided parameters."""
    replicated_bytes: int
    whole_sharded_bytes: int
    """Bytes of the divided parameters over all ranks, each counted once."""

    def __str__(self) -> str:
        share = self.sharded_bytes / self.whole_sharded_bytes
        mib = 2**20
        return (
            f"{(self.sharded_bytes + self.replicated_bytes) / mib:.1f} MiB of weights: {self.sharded_bytes / mib:.1f} are "
            f"{share:.2%} of {self.whole_sharded_bytes / mib:.1f} divided, {self.replicated_bytes / mib:.2f} are on every rank"
        )


def load_part(
    config: Any, source: str, dtype: torch.dtype, device: torch.device, group: RankGroup, trust_remote_code: bool
) -> tuple[PreTrainedModel, LoadedPart]:
    """This rank's part of the model, whose forward pass communicates with the other ranks.

    Logits are complete on rank 0 and partial elsewhere. Raises UnsupportedModel for a model that cannot be divided, and ValueError
    for a number of ranks that cannot divide it.
    """
    model, checkpoint = build_empty(config, source, dtype, trust_remote_code)
    plan = ShardingPlan.of(model, group.size)
    share = plan.shares[group.rank]
    linears = {name: model.get_submodule(name) for name in plan.styles}
    parts = {name: plan.part(name, module, group.rank) for name, module in linears.items()}
    slices = {f"{name}.{key}": one for name, module in linears.items() for key, one in divide(module, parts[name]).items()}
    sizes = {name: part_sizes(module, parts[name]) for name, module in linears.items()}
    divided = {name for name, one in slices.items() if one.ranges}
    whole_sharded_bytes = sum(empty.nbytes for name, empty in model.named_parameters() if name in divided)
    fill(model, checkpoint, device, slices)
    sharded_bytes = sum(held.nbytes for name, held in model.named_parameters() if name in divided)
    for name, module in list(model.named_modules()):
        if name in linears:
            resize(module, *sizes[name])
            _join(module, plan.styles[name], share, group)
        elif hasattr(module, "layer_idx") and hasattr(module, "config"):
            _localize(module, share)
    return model, LoadedPart(
        kv_heads=share.kv_heads,
        tokens=share.tokens,
        sharded_bytes=sharded_bytes,
        replicated_bytes=sum(held.nbytes for held in model.parameters()) - sharded_bytes,
        whole_sharded_bytes=whole_sharded_bytes,
    )


def load_whole(config: Any, source: str, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> PreTrainedModel:
    """The whole model on one rank, its weights in the checkpoint's own format. Raises UnsupportedModel."""
    model, checkpoint = build_empty(config, source, dtype, trust_remote_code)
    fill(model, checkpoint, device, {})
    return model


def _localize(attention: Module, share: RankShare) -> None:
    """Sets this rank's head counts on an attention module and its configuration, where forward passes read them."""
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
        "split_size": len(share.heads) * getattr(attention, "head_dim", 0),  # gpt2: width of the query, and of key and value
    }
    for key, count in counts.items():
        if hasattr(attention, key):
            setattr(attention, key, count)


def _join(module: Module, style: ShardingStyle, share: RankShare, group: RankGroup) -> None:
    """Adds the collective that the module's style needs after its forward pass."""
    if style in REDUCED:
        module.register_forward_hook(lambda _module, _args, output: group.all_reduce(output))
    elif style is ShardingStyle.TOKENS and isinstance(module, torch.nn.Embedding):
        _join_embedding(module, share.tokens, group)
    elif style is ShardingStyle.TOKENS:
        module.register_forward_hook(lambda _module, _args, output: _gathered(output, group))


def _join_embedding(module: torch.nn.Embedding, tokens: range, group: RankGroup) -> None:
    lookup = module.forward

    def forward(token_ids: Tensor) -> Tensor:
        local_ids, is_here = localize(token_ids, tokens)
        return group.all_reduce(lookup(local_ids) * is_here[..., None])

    module.forward = forward  # type: ignore[method-assign, assignment]


def localize(token_ids: Tensor, tokens: range) -> tuple[Tensor, Tensor]:
    """Rows in a table that holds only `tokens`, and a mask of the ids found there; an id outside gets an arbitrary row."""
    local_ids = token_ids - tokens.start
    is_here = (local_ids >= 0) & (local_ids < len(tokens))
    return local_ids.clamp(0, len(tokens) - 1), is_here


def _gathered(output: Tensor, group: RankGroup) -> Tensor:
    """Logits of the whole vocabulary on rank 0; elsewhere this rank's part, which is not read."""
    whole = group.gather_last(output)
    return output if whole is None else whole
