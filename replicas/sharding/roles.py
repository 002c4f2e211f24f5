"""How each linear module is divided over ranks, from the family's `tp_plan` in transformers or a plan of ours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from torch.nn import Module
from transformers import PreTrainedModel

from replicas.model_support import UnsupportedModel


class Role(Enum):
    """How a module's inputs or outputs are divided over ranks. A module without one is whole on every rank."""

    QUERY = "outputs by query head"
    KEY_VALUE = "outputs by KV head"
    FUSED_QKV = "outputs: query, key and value, concatenated"
    OUTPUT = "inputs by query head; ranks add up"
    COLUMN = "outputs by MLP column"
    FUSED_GATE_UP = "outputs: gate and up, concatenated"
    ROW = "inputs by MLP column; ranks add up"
    TOKENS = "rows by token id"


OWN_PLANS: Mapping[str, Mapping[str, Role]] = {  # model type -> module under the base model -> role
    "gpt2": {
        "h.*.attn.c_attn": Role.FUSED_QKV,
        "h.*.attn.c_proj": Role.OUTPUT,
        "h.*.mlp.c_fc": Role.COLUMN,
        "h.*.mlp.c_proj": Role.ROW,
    },
    "phi3": {
        "layers.*.self_attn.qkv_proj": Role.FUSED_QKV,
        "layers.*.self_attn.o_proj": Role.OUTPUT,
        "layers.*.mlp.gate_up_proj": Role.FUSED_GATE_UP,
        "layers.*.mlp.down_proj": Role.ROW,
    },
}
"""Plans for families whose plan in transformers gathers fused projections on every rank, or that have none."""

_ATTENTION_INPUTS = {"q_proj": Role.QUERY, "k_proj": Role.KEY_VALUE, "v_proj": Role.KEY_VALUE}
_NEEDED = ({Role.QUERY, Role.FUSED_QKV}, {Role.OUTPUT}, {Role.COLUMN, Role.FUSED_GATE_UP}, {Role.ROW})
_WHOLE_STYLES = frozenset({"replicated_with_grad_allreduce"})


def roles_of(model: PreTrainedModel) -> dict[str, Role]:
    """Module name -> role, for a decoder with a plan. Raises UnsupportedModel with the module that cannot be divided."""
    model_type = model.config.model_type
    base = model.base_model
    prefix = f"{model.base_model_prefix}." if base is not model else ""
    names: dict[str, Any] = {prefix + name: module for name, module in base.named_modules()}
    roles: dict[str, Role] = {}
    if model_type in OWN_PLANS:
        for pattern, role in OWN_PLANS[model_type].items():
            roles |= dict.fromkeys(_matching(names, prefix + pattern), role)
    else:
        plan = getattr(model.config.get_text_config(decoder=True), "base_model_tp_plan", None) or {}
        names |= {prefix + name: parameter for name, parameter in base.named_parameters()}  # experts may be plain parameters
        for pattern, style in plan.items():
            for name in _matching(names, prefix + pattern):
                if (found := _role(model_type, name, style, names[name.rpartition(".")[0]])) is not None:
                    roles[name] = found
    found_roles = set(roles.values())
    if not all(found_roles & needed for needed in _NEEDED):
        raise UnsupportedModel(f"model type {model_type!r} has no plan for tensor parallelism; set tensor_parallel_size to 1")
    tables = {id(table) for table in (model.get_input_embeddings(), model.get_output_embeddings()) if table is not None}
    roles |= {name: Role.TOKENS for name, module in model.named_modules() if id(module) in tables}
    return roles


def _role(model_type: str, name: str, style: Any, parent: Module) -> Role | None:
    leaf = name.rsplit(".", 1)[-1]
    is_attention = hasattr(parent, "layer_idx")
    role = None
    if style == "colwise":
        role = _ATTENTION_INPUTS.get(leaf) if is_attention else Role.COLUMN
    elif style == "rowwise":
        role = Role.OUTPUT if is_attention else Role.ROW
    elif style in _WHOLE_STYLES:
        return None
    if role is None:
        raise UnsupportedModel(
            f"model type {model_type!r}: {leaf} ({style}) cannot be divided over ranks by this version; set tensor_parallel_size to 1"
        )
    return role


def _matching(names: Mapping[str, Any], pattern: str) -> Iterator[str]:
    expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return (name for name in names if expression.fullmatch(name))
