"""The memory behind block ids. Letters of shapes: B blocks, H kv heads, T tokens of a block, D dim of a head."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcache.spec import KVGroupSpec, KVLayout


class KVTensors:
    """Owns the K and V tensors of every layer on one rank, in the layout of its attention backend.

    Block `b` of the pool is row `b` of each tensor. Memory is not cleared, so on a CPU pages are allocated when first written.
    """

    def __init__(
        self,
        groups: Sequence[KVGroupSpec],
        *,
        layout: KVLayout,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.groups = tuple(groups)
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # layer index -> K, V
        for group in groups:
            for layer in group.layers:
                k_shape, v_shape = (
                    [num_blocks, *({"h": group.num_kv_heads, "t": block_size, "d": dim}[axis] for axis in axes)]
                    for axes, dim in ((layout.k_axes, group.k_dim), (layout.v_axes, group.v_dim))
                )
                self._layers[layer] = (torch.empty(k_shape, dtype=dtype, device=device), torch.empty(v_shape, dtype=dtype, device=device))

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer in this layout, all blocks."""
        return self._layers[index]

    def canonical(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one layer's K and V as [B, H, T, D]; writing to them writes the cache."""
        k, v = self._layers[index]
        return _to_canonical(k, self.layout.k_axes), _to_canonical(v, self.layout.v_axes)

    def fill(self, block_ids: Sequence[int], value: float) -> None:
        """Overwrites blocks, for tests that poison free ones."""
        index = torch.tensor(block_ids, dtype=torch.long)
        for k, v in self._layers.values():
            k[index.to(k.device)] = value
            v[index.to(v.device)] = value


def bytes_per_token(groups: Sequence[KVGroupSpec], dtype: torch.dtype) -> int:
    """Bytes of K and V per token on one rank."""
    return sum(group.num_values_per_token() for group in groups) * dtype.itemsize


def _to_canonical(tensor: torch.Tensor, axes: str) -> torch.Tensor:
    return tensor.permute(0, *(1 + axes.index(axis) for axis in "htd"))
