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
from replicas.sharding.roles import Role, roles_of

REDUCED = frozenset({Role.OUTPUT, Role.ROW})
"""Roles whose outputs are summed over ranks. Only rank 0 holds their biases, so that each counts once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """How a model is divided over ranks. Every rank makes the same plan from the model's shapes, which may be on the meta device."""

    shape: ModelShape
    shares: tuple[RankShare, ...]
    roles: Mapping[str, Role]  # module name -> role

    @classmethod
    def of(cls, model: PreTrainedModel, num_ranks: int) -> ShardingPlan:
        """Raises UnsupportedModel for a family that cannot be divided, and ValueError with the sizes that work for a size that does not."""
        roles = roles_of(model)
        shape = _shape(model, roles)
        plan = cls(shape=shape, shares=partition(shape, num_ranks), roles=roles)
        if (reason := plan._why_not(model)) is not None:
            others = (cls(shape=shape, shares=partition(shape, size), roles=roles) for size in range(1, largest_size(shape) + 1))
            sizes = ", ".join(str(len(other.shares)) for other in others if other._why_not(model) is None)
            raise ValueError(f"tensor_parallel_size {num_ranks} cannot divide {reason}; sizes that work: {sizes}")
        return plan

    def part(self, name: str, module: Module, rank: int) -> LinearPart:
        """A rank's part of a module with a role; the module has its undivided sizes."""
        role, share, shape = self.roles[name], self.shares[rank], self.shape
        num_outputs, num_inputs = features(module)
        if role not in REDUCED:
            return LinearPart(side="outputs", ranges=self._output_ranges(role, share, num_outputs))
        pieces, num_pieces = (share.heads, shape.num_heads) if role is Role.OUTPUT else (share.columns, shape.num_columns)
        return LinearPart(side="inputs", ranges=(_scaled(pieces, num_inputs // num_pieces, 0),), has_bias=rank == 0)

    def _why_not(self, model: PreTrainedModel) -> str | None:
        """The first linear whose format this plan cannot divide, and why; one of each kind is tried."""
        kinds: dict[tuple[Role, tuple[int, int], LinearMethod], tuple[str, Module]] = {}
        for name, role in self.roles.items():
            module = model.get_submodule(name)
            kinds.setdefault((role, features(module), method_of(module)), (name, module))
        for name, module in kinds.values():
            try:
                for rank in range(len(self.shares)):
                    divide(module, self.part(name, module, rank))
            except Indivisible as error:
                return f"{name}, whose {error}"
        return None

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


def _scaled(pieces: range, width: int, offset: int) -> range:
    return range(offset + pieces.start * width, offset + pieces.stop * width)


def _shape(model: PreTrainedModel, roles: Mapping[str, Role]) -> ModelShape:
    config = model.config.get_text_config(decoder=True)
    num_heads = int(config.num_attention_heads)
    num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
    sizes: dict[Role, set[tuple[int, int]]] = {}
    modules: dict[Role, list[Module]] = {role: [] for role in Role}
    num_bytes = dict.fromkeys(Role, 0)
    seen: set[int] = set()  # tied tables count once
    for name, role in roles.items():
        module = model.get_submodule(name)
        modules[role].append(module)
        sizes.setdefault(role, set()).add(features(module))
        for tensor in formatted(module):
            parameter = module.get_parameter(tensor.key)
            if id(parameter) not in seen:
                seen.add(id(parameter))
                num_bytes[role] += parameter.nbytes
    if uneven := sorted(role.name.lower() for role, found in sizes.items() if len(found) > 1 and role is not Role.KEY_VALUE):
        raise UnsupportedModel(
            f"model type {model.config.model_type!r}: its layers differ in size ({', '.join(uneven)}); set tensor_parallel_size to 1"
        )
    num_columns = _only(sizes[Role.ROW])[1]
    fused = num_bytes[Role.FUSED_QKV] // (num_heads + 2 * num_kv_heads)
    mlp = num_bytes[Role.COLUMN] + num_bytes[Role.FUSED_GATE_UP] + num_bytes[Role.ROW]
    vocab_size = _only(sizes[Role.TOKENS])[0]
    return ModelShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_columns=num_columns,
        vocab_size=vocab_size,
        bytes_per_head=(num_bytes[Role.QUERY] + num_bytes[Role.OUTPUT]) // num_heads + fused,
        bytes_per_kv_head=num_bytes[Role.KEY_VALUE] // num_kv_heads + 2 * fused,
        bytes_per_column=mlp // num_columns,
        bytes_per_token=num_bytes[Role.TOKENS] // vocab_size,
        column_unit=math.lcm(unit(modules[Role.ROW], "inputs"), unit(modules[Role.COLUMN] + modules[Role.FUSED_GATE_UP], "outputs")),
        token_unit=unit(modules[Role.TOKENS], "outputs"),
    )


def _only(sizes: set[tuple[int, int]]) -> tuple[int, int]:
    (size,) = sizes
    return size
