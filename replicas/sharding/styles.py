"""How each linear module is divided over ranks, from the family's `tp_plan` in transformers or a plan of ours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from torch.nn import Module
from transformers import PreTrainedModel

from replicas.model_support import UnsupportedModel


class ShardingStyle(Enum):
    """How a module's inputs or outputs are divided over ranks. A module without one is whole on every rank."""

    QUERY = "outputs by query head"
    KEY_VALUE = "outputs by KV head"
    FUSED_QKV = "outputs: query, key and value, concatenated"
    OUTPUT = "inputs by query head; ranks add up"
    COLUMN = "outputs by MLP column"
    FUSED_GATE_UP = "outputs: gate and up, concatenated"
    ROW = "inputs by MLP column; ranks add up"
    TOKENS = "rows by token id"


OWN_PLANS: Mapping[str, Mapping[str, ShardingStyle]] = {  # model type -> module under the base model -> style
    "gpt2": {
        "h.*.attn.c_attn": ShardingStyle.FUSED_QKV,
        "h.*.attn.c_proj": ShardingStyle.OUTPUT,
        "h.*.mlp.c_fc": ShardingStyle.COLUMN,
        "h.*.mlp.c_proj": ShardingStyle.ROW,
    },
    "phi3": {
        "layers.*.self_attn.qkv_proj": ShardingStyle.FUSED_QKV,
        "layers.*.self_attn.o_proj": ShardingStyle.OUTPUT,
        "layers.*.mlp.gate_up_proj": ShardingStyle.FUSED_GATE_UP,
        "layers.*.mlp.down_proj": ShardingStyle.ROW,
    },
}
"""Plans for families whose plan in transformers gathers fused projections on every rank, or that have none."""

_ATTENTION_INPUTS = {"q_proj": ShardingStyle.QUERY, "k_proj": ShardingStyle.KEY_VALUE, "v_proj": ShardingStyle.KEY_VALUE}
_NEEDED = (
    {ShardingStyle.QUERY, ShardingStyle.FUSED_QKV},
    {ShardingStyle.OUTPUT},
    {ShardingStyle.COLUMN, ShardingStyle.FUSED_GATE_UP},
    {ShardingStyle.ROW},
)
_WHOLE_TP_STYLES = frozenset({"replicated_with_grad_allreduce"})


def styles_of(model: PreTrainedModel) -> dict[str, ShardingStyle]:
    """Module name -> style, for a decoder with a plan. Raises UnsupportedModel with the module that cannot be divided."""
    model_type = model.config.model_type
    base = model.base_model
    prefix = f"{model.base_model_prefix}." if base is not model else ""
    names: dict[str, Any] = {prefix + name: module for name, module in base.named_modules()}
    styles: dict[str, ShardingStyle] = {}
    if model_type in OWN_PLANS:
        for pattern, style in OWN_PLANS[model_type].items():
            styles |= dict.fromkeys(_matching(names, prefix + pattern), style)
    else:
        plan = getattr(model.config.get_text_config(decoder=True), "base_model_tp_plan", None) or {}
        names |= {prefix + name: parameter for name, parameter in base.named_parameters()}  # experts may be plain parameters
        for pattern, tp_style in plan.items():
            for name in _matching(names, prefix + pattern):
                if (found := _style(model_type, name, tp_style, names[name.rpartition(".")[0]])) is not None:
                    styles[name] = found
    found_styles = set(styles.values())
    if not all(found_styles & needed for needed in _NEEDED):
        raise UnsupportedModel(f"model type {model_type!r} has no plan for tensor parallelism; set tensor_parallel_size to 1")
    tables = {id(table) for table in (model.get_input_embeddings(), model.get_output_embeddings()) if table is not None}
    styles |= {name: ShardingStyle.TOKENS for name, module in model.named_modules() if id(module) in tables}
    return styles


def _style(model_type: str, name: str, tp_style: Any, parent: Module) -> ShardingStyle | None:
    leaf = name.rsplit(".", 1)[-1]
    is_attention = hasattr(parent, "layer_idx")
    style = None
    if tp_style == "colwise":
        style = _ATTENTION_INPUTS.get(leaf) if is_attention else ShardingStyle.COLUMN
    elif tp_style == "rowwise":
        style = ShardingStyle.OUTPUT if is_attention else ShardingStyle.ROW
    elif tp_style in _WHOLE_TP_STYLES:
        return None
    if style is None:
        raise UnsupportedModel(
            f"model type {model_type!r}: {leaf} ({tp_style}) cannot be divided over ranks by this version; set tensor_parallel_size to 1"
        )
    return style


def _matching(names: Mapping[str, Any], pattern: str) -> Iterator[str]:
    expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return (name for name in names if expression.fullmatch(name))
