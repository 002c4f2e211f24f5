"""The plan of one model for one group of ranks: which slice of which parameter a rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.nn import Module
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from replicas.model_support import UnsupportedModel
from replicas.sharding.partition import ModelShape, RankShare, partition
from replicas.sharding.roles import Role, roles_of

REDUCED = frozenset({Role.OUTPUT, Role.ROW})
"""Modules after which the ranks add up. Their biases are on rank 0 alone, so that they count once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlice:
    """What a rank holds of one parameter: `ranges` along `dim`, or nothing of it when `ranges` is empty."""

    dim: int
    ranges: tuple[range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """Every rank makes the same plan from the model's shapes alone; the model may be on the meta device."""

    shape: ModelShape
    shares: tuple[RankShare, ...]
    roles: Mapping[str, Role]  # module name -> role

    @classmethod
    def of(cls, model: PreTrainedModel, num_ranks: int) -> ShardingPlan:
        """Raises UnsupportedModel for a family that cannot be divided, ValueError for a size that does not work."""
        roles = roles_of(model)
        shape = _shape(model, roles)
        return cls(shape=shape, shares=partition(shape, num_ranks), roles=roles)

    def slices(self, name: str, module: Module, rank: int) -> dict[str, ParameterSlice]:
        """Parameter name -> slice, for a module with a role."""
        role, share, shape = self.roles[name], self.shares[rank], self.shape
        num_outputs, num_inputs = features(module)
        weight: tuple[range, ...]
        bias: tuple[range, ...]
        if role in REDUCED:
            pieces, num_pieces = (share.heads, shape.num_heads) if role is Role.OUTPUT else (share.columns, shape.num_columns)
            weight = (_scaled(pieces, num_inputs // num_pieces, 0),)
            bias = (range(num_outputs),) if rank == 0 else ()
        else:
            weight = bias = self._output_ranges(role, share, num_outputs)
        divides_dim_0 = (role in REDUCED) == isinstance(module, Conv1D)
        found = {"weight": ParameterSlice(dim=0 if divides_dim_0 else 1, ranges=weight)}
        if getattr(module, "bias", None) is not None:
            found["bias"] = ParameterSlice(dim=0, ranges=bias)
        return found

    def _output_ranges(self, role: Role, share: RankShare, num_outputs: int) -> tuple[range, ...]:
        shape = self.shape
        match role:
            case Role.QUERY:
                return (_scaled(share.heads, num_outputs // shape.num_heads, 0),)
            case Role.KEY_VALUE:
                return (_scaled(share.kv_heads, num_outputs // shape.num_kv_heads, 0),)
            case Role.FUSED_QKV:
                dim = num_outputs // (shape.num_heads + 2 * shape.num_kv_heads)
                key, value = shape.num_heads * dim, (shape.num_heads + shape.num_kv_heads) * dim
                return (_scaled(share.heads, dim, 0), _scaled(share.kv_heads, dim, key), _scaled(share.kv_heads, dim, value))
            case Role.FUSED_GATE_UP:
                return (share.columns, _scaled(share.columns, 1, shape.num_columns))
            case Role.COLUMN:
                return (share.columns,)
            case _:
                return (share.tokens,)


def features(module: Module) -> tuple[int, int]:
    """Outputs and inputs of a linear module or Conv1D; rows and width of an embedding."""
    first, second = module.weight.shape  # type: ignore[misc]
    return (int(second), int(first)) if isinstance(module, Conv1D) else (int(first), int(second))


def _scaled(pieces: range, width: int, offset: int) -> range:
    return range(offset + pieces.start * width, offset + pieces.stop * width)


def _shape(model: PreTrainedModel, roles: Mapping[str, Role]) -> ModelShape:
    config = model.config.get_text_config(decoder=True)
    num_heads = int(config.num_attention_heads)
    num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
    sizes: dict[Role, set[tuple[int, int]]] = {}
    weights = dict.fromkeys(Role, 0)
    seen: set[int] = set()  # tied tables count once
    for name, role in roles.items():
        module = model.get_submodule(name)
        sizes.setdefault(role, set()).add(features(module))
        if id(module.weight) not in seen:
            seen.add(id(module.weight))
            weights[role] += module.weight.numel()
    if uneven := sorted(role.name.lower() for role, found in sizes.items() if len(found) > 1 and role is not Role.KEY_VALUE):
        raise UnsupportedModel(
            f"model type {model.config.model_type!r}: its layers differ in size ({', '.join(uneven)}); set tensor_parallel_size to 1"
        )
    num_columns = _only(sizes[Role.ROW])[1]
    fused = weights[Role.FUSED_QKV] // (num_heads + 2 * num_kv_heads)
    mlp = weights[Role.COLUMN] + weights[Role.FUSED_GATE_UP] + weights[Role.ROW]
    vocab_size = _only(sizes[Role.TOKENS])[0]
    return ModelShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_columns=num_columns,
        vocab_size=vocab_size,
        weights_per_head=(weights[Role.QUERY] + weights[Role.OUTPUT]) // num_heads + fused,
        weights_per_kv_head=weights[Role.KEY_VALUE] // num_kv_heads + 2 * fused,
        weights_per_column=mlp // num_columns,
        weights_per_token=weights[Role.TOKENS] // vocab_size,
    )


def _only(sizes: set[tuple[int, int]]) -> tuple[int, int]:
    (size,) = sizes
    return size
