"""The content of a KV block and its layout in memory. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroupSpec:
    """Layers with the same kind of KV: `num_kv_heads` heads of `k_dim` and `v_dim` per token and layer."""

    layers: tuple[int, ...]
    kind: Literal["full", "window"]
    window: int | None
    """Number of tokens that a query sees, itself included, when `kind` is "window"; else None."""
    num_kv_heads: int
    k_dim: int
    v_dim: int

    def num_values_per_token(self) -> int:
        """Elements of K and V per token in all layers of the group."""
        return len(self.layers) * self.num_kv_heads * (self.k_dim + self.v_dim)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Order of the axes within a block, outermost first: h kv_head, t token, d dim. The canonical order is "htd"."""

    k_axes: str
    v_axes: str

    def __post_init__(self) -> None:
        for name, axes in (("k_axes", self.k_axes), ("v_axes", self.v_axes)):
            if sorted(axes) != ["d", "h", "t"]:
                raise ValueError(f"{name} must be an order of the letters h, t and d, got {axes!r}")

    @property
    def id(self) -> str:
        return f"{self.k_axes}-{self.v_axes}"


CANONICAL_LAYOUT = KVLayout("htd", "htd")
