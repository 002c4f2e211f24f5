"""KV blocks as flat tensors for a link. Letters of shapes: B blocks, H kv heads, T tokens of a block, D dim of a head.

The canonical order is [layer, block, K/V, kv_head, token, dim]. Between replicas of equal layout the last three axes keep
the order of that layout, so that both sides copy whole blocks without permuting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvcache.spec import CANONICAL_LAYOUT, KVLayout
from kvcache.tensors import KVTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat:
    """The part of each block in a message, and its order. Both sides must use the same format."""

    layout: KVLayout
    layers: tuple[int, int]
    heads: tuple[int, int] | None
    """First head and the one after the last, among the rank's heads; None for all of them."""


def wire_layout(source: KVLayout, target_id: str) -> KVLayout:
    """The layout for messages between two memories: their own when they agree, else the canonical one."""
    return source if source.id == target_id else CANONICAL_LAYOUT


def parse_layout(layout_id: str) -> KVLayout:
    """The layout with an id. Raises ValueError for an invalid id."""
    k_axes, _, v_axes = layout_id.partition("-")
    return KVLayout(k_axes, v_axes)


def why_not_form(kv: KVTensors, form: WireFormat) -> str | None:
    """Why this memory lacks layers or heads of a format; None when it has them."""
    num_layers = sum(len(group.layers) for group in kv.groups)
    if not 0 <= form.layers[0] < form.layers[1] <= num_layers:
        return f"layers {form.layers} are not within the {num_layers} layers of this replica"
    least_heads = min(group.num_kv_heads for group in kv.groups)
    if form.heads is not None and not 0 <= form.heads[0] < form.heads[1] <= least_heads:
        return f"heads {form.heads} are not within the {least_heads} KV heads of this rank"
    return None


def num_values_per_block(kv: KVTensors, form: WireFormat) -> int:
    """Elements per block in a message."""
    return sum(
        (group.k_dim + group.v_dim) * kv.block_size * _num_heads(form, group.num_kv_heads)
        for group in kv.groups
        for layer in group.layers
        if form.layers[0] <= layer < form.layers[1]
    )


def pack(kv: KVTensors, block_ids: Sequence[int], form: WireFormat) -> torch.Tensor:
    """Copies blocks to one flat tensor of the cache's dtype, on its device."""
    k, _ = kv.layer(form.layers[0])
    data = torch.empty(len(block_ids) * num_values_per_block(kv, form), dtype=k.dtype, device=k.device)
    index = torch.tensor(block_ids, dtype=torch.long, device=k.device)
    for memory, message in _planes(kv, form, data, len(block_ids)):
        message.copy_(memory.index_select(0, index))
    return data


def unpack(kv: KVTensors, block_ids: Sequence[int], data: torch.Tensor, form: WireFormat) -> None:
    """Writes a flat tensor from `pack` (any dtype) to blocks. Raises ValueError when its size does not match."""
    expected = len(block_ids) * num_values_per_block(kv, form)
    if data.numel() != expected:
        raise ValueError(f"a message of {len(block_ids)} blocks must hold {expected} values, got {data.numel()}")
    k, _ = kv.layer(form.layers[0])
    index = torch.tensor(block_ids, dtype=torch.long, device=k.device)
    data = data.to(device=k.device, dtype=k.dtype)
    for memory, message in _planes(kv, form, data, len(block_ids)):
        memory.index_copy_(0, index, message)


def _planes(kv: KVTensors, form: WireFormat, data: torch.Tensor, num_blocks: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For K and then V of every layer: the memory [all blocks, ...] and its part of the message [B, ...], in the same axis order."""
    start = 0
    is_same = form.layout.id == kv.layout.id
    heads_of = {layer: group.num_kv_heads for group in kv.groups for layer in group.layers}
    for layer in range(*form.layers):
        memories = kv.layer(layer) if is_same else kv.canonical(layer)
        axes = (kv.layout.k_axes, kv.layout.v_axes) if is_same else (CANONICAL_LAYOUT.k_axes, CANONICAL_LAYOUT.v_axes)
        first, end = form.heads or (0, heads_of[layer])
        planes = [memory.narrow(1 + order.index("h"), first, end - first) for memory, order in zip(memories, axes, strict=True)]
        sizes = [plane[0].numel() for plane in planes]
        rows_BN = data[start : start + num_blocks * sum(sizes)].view(num_blocks, sum(sizes))
        start += rows_BN.numel()
        parts_BN = (rows_BN[:, : sizes[0]], rows_BN[:, sizes[0] :])
        for plane, part_BN in zip(planes, parts_BN, strict=True):
            yield plane, part_BN.view(num_blocks, *plane.shape[1:])


def _num_heads(form: WireFormat, num_kv_heads: int) -> int:
    return num_kv_heads if form.heads is None else form.heads[1] - form.heads[0]
