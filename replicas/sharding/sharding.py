"""The plan of one model for one group of ranks: which part of each linear a rank holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch.nn import Module
from transformers import PreTrainedModel

from replicas.linear.division import Indivisible, LinearPart, divide, unit
from replicas.linear.method import LinearMethod
from replicas.linear.modules import features, formatted, method_of
from replicas.model_support import UnsupportedModel
from replicas.sharding.partition import ModelShape, RankShare, largest_size, partition
from replicas.sharding.styles import ShardingStyle, styles_of

REDUCED = frozenset({ShardingStyle.OUTPUT, ShardingStyle.ROW})
"""Styles whose outputs are summed over ranks. Only rank 0 holds their biases, so that each counts once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """How a model is divided over ranks. Every rank makes the same plan from the model's shapes, which may be on the meta device."""

    shape: ModelShape
    shares: tuple[RankShare, ...]
    styles: Mapping[str, ShardingStyle]  # module name -> style

    @classmethod
    def of(cls, model: PreTrainedModel, num_ranks: int) -> ShardingPlan:
        """Raises UnsupportedModel for a family that cannot be divided, and ValueError with the sizes that work for a size that does not."""
        styles = styles_of(model)
        shape = _shape(model, styles)
        plan = cls(shape=shape, shares=partition(shape, num_ranks), styles=styles)
        if (reason := plan._why_not(model)) is not None:
            others = (cls(shape=shape, shares=partition(shape, size), styles=styles) for size in range(1, largest_size(shape) + 1))
            sizes = ", ".join(str(len(other.shares)) for other in others if other._why_not(model) is None)
            raise ValueError(f"tensor_parallel_size {num_ranks} cannot divide {reason}; sizes that work: {sizes}")
        return plan

    def part(self, name: str, module: Module, rank: int) -> LinearPart:
        """A rank's part of a module with a style; the module has its undivided sizes."""
        style, share, shape = self.styles[name], self.shares[rank], self.shape
        num_outputs, num_inputs = features(module)
        if style not in REDUCED:
            return LinearPart(side="outputs", ranges=self._output_ranges(style, share, num_outputs))
        pieces, num_pieces = (share.heads, shape.num_heads) if style is ShardingStyle.OUTPUT else (share.columns, shape.num_columns)
        return LinearPart(side="inputs", ranges=(_scaled(pieces, num_inputs // num_pieces, 0),), has_bias=rank == 0)

    def _why_not(self, model: PreTrainedModel) -> str | None:
        """The first linear whose format this plan cannot divide, and why; one of each kind is tried."""
        kinds: dict[tuple[ShardingStyle, tuple[int, int], LinearMethod], tuple[str, Module]] = {}
        for name, style in self.styles.items():
            module = model.get_submodule(name)
            kinds.setdefault((style, features(module), method_of(module)), (name, module))
        for name, module in kinds.values():
            try:
                for rank in range(len(self.shares)):
                    divide(module, self.part(name, module, rank))
            except Indivisible as error:
                return f"{name}, whose {error}"
        return None

    def _output_ranges(self, style: ShardingStyle, share: RankShare, num_outputs: int) -> tuple[range, ...]:
        shape = self.shape
        match style:
            case ShardingStyle.QUERY:
                return (_scaled(share.heads, num_outputs // shape.num_heads, 0),)
            case ShardingStyle.KEY_VALUE:
                return (_scaled(share.kv_heads, num_outputs // shape.num_kv_heads, 0),)
            case ShardingStyle.FUSED_QKV:
                dim = num_outputs // (shape.num_heads + 2 * shape.num_kv_heads)
                key, value = shape.num_heads * dim, (shape.num_heads + shape.num_kv_heads) * dim
                return (_scaled(share.heads, dim, 0), _scaled(share.kv_heads, dim, key), _scaled(share.kv_heads, dim, value))
            case ShardingStyle.FUSED_GATE_UP:
                return (share.columns, _scaled(share.columns, 1, shape.num_columns))
            case ShardingStyle.COLUMN:
                return (share.columns,)
            case _:
                return (share.tokens,)


def _scaled(pieces: range, width: int, offset: int) -> range:
    return range(offset + pieces.start * width, offset + pieces.stop * width)


def _shape(model: PreTrainedModel, styles: Mapping[str, ShardingStyle]) -> ModelShape:
    config = model.config.get_text_config(decoder=True)
    num_heads = int(config.num_attention_heads)
    num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
    sizes: dict[ShardingStyle, set[tuple[int, int]]] = {}
    modules: dict[ShardingStyle, list[Module]] = {style: [] for style in ShardingStyle}
    num_bytes = dict.fromkeys(ShardingStyle, 0)
    seen: set[int] = set()  # tied tables count once
    for name, style in styles.items():
        module = model.get_submodule(name)
        modules[style].append(module)
        sizes.setdefault(style, set()).add(features(module))
        for tensor in formatted(module):
            parameter = module.get_parameter(tensor.key)
            if id(parameter) not in seen:
                seen.add(id(parameter))
                num_bytes[style] += parameter.nbytes
    if uneven := sorted(style.name.lower() for style, found in sizes.items() if len(found) > 1 and style is not ShardingStyle.KEY_VALUE):
        raise UnsupportedModel(
            f"model type {model.config.model_type!r}: its layers differ in size ({', '.join(uneven)}); set tensor_parallel_size to 1"
        )
    num_columns = _only(sizes[ShardingStyle.ROW])[1]
    fused = num_bytes[ShardingStyle.FUSED_QKV] // (num_heads + 2 * num_kv_heads)
    mlp = num_bytes[ShardingStyle.COLUMN] + num_bytes[ShardingStyle.FUSED_GATE_UP] + num_bytes[ShardingStyle.ROW]
    vocab_size = _only(sizes[ShardingStyle.TOKENS])[0]
    return ModelShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_columns=num_columns,
        vocab_size=vocab_size,
        bytes_per_head=(num_bytes[ShardingStyle.QUERY] + num_bytes[ShardingStyle.OUTPUT]) // num_heads + fused,
        bytes_per_kv_head=num_bytes[ShardingStyle.KEY_VALUE] // num_kv_heads + 2 * fused,
        bytes_per_column=mlp // num_columns,
        bytes_per_token=num_bytes[ShardingStyle.TOKENS] // vocab_size,
        column_unit=math.lcm(
            unit(modules[ShardingStyle.ROW], "inputs"),
            unit(modules[ShardingStyle.COLUMN] + modules[ShardingStyle.FUSED_GATE_UP], "outputs"),
        ),
        token_unit=unit(modules[ShardingStyle.TOKENS], "outputs"),
    )


def _only(sizes: set[tuple[int, int]]) -> tuple[int, int]:
    (size,) = sizes
    return size
