"""The settings of an EAGLE head, from the configurations of EAGLE's authors, SpecForge and speculators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replicas.model_support import LENGTH_DEPENDENT_ROPE
from replicas.speculation.heads.exactness import inexact_option
from replicas.speculation.heads.head_files import BadHead


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSettings:
    """Sizes and variants of one head; a head has one decoder layer."""

    is_eagle3: bool
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_parameters: Mapping[str, Any]
    max_positions: int
    window: int | None
    layer_ids: tuple[int, ...]
    """Hidden states of the target that the head reads: i is the input of layer i, the number of layers is the final norm's output."""
    draft_vocab_size: int | None
    """Token ids that the head can draft; None for all of the target's."""
    has_bias: bool | None
    """Whether `fc` of EAGLE-1 has a bias; None if the configuration does not say."""
    norm_before_residual: bool
    """Whether the attention's residual is the normed hidden state (EAGLE-3)."""
    norm_output: bool
    """Whether the head's next input is its output behind the norm (EAGLE 3.1)."""
    norm_before_fc: bool
    """One norm over all hidden states in front of `fc`."""
    fc_norm: bool
    """A norm for each hidden state in front of `fc`."""


def is_eagle(config: Mapping[str, Any]) -> bool:
    """Whether a head's configuration, which is no Medusa head's, is that of an EAGLE head and not of a plain draft model."""
    architectures = " ".join(config.get("architectures") or ())
    keys = ("speculators_model_type", "eagle_config", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    return "eagle" in architectures.lower() or any(key in config for key in keys)


def read_settings(
    config: Mapping[str, Any], source: str, *, is_eagle3: bool, target_hidden_size: int, num_target_layers: int, target_vocab_size: int
) -> EagleSettings:
    """Raises BadHead for a variant that is not served, or one made for a target of other sizes."""
    if (inexact := inexact_option(config)) is not None:
        raise BadHead(f"{source}: {inexact} accepts tokens that the target would not draw; only exact verification is served")
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise BadHead(f"{source} has speculators_model_type {kind!r}, which is not served; heads that are: eagle3")
    nested = config.get("eagle_config") or {}
    layer = config.get("transformer_layer_config") or config

    def option(name: str, default: Any) -> Any:
        return next((part[name] for part in (config, nested, layer) if part.get(name) is not None), default)

    def size(name: str, default: Any = None) -> int:
        value = option(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadHead(f"{source}: config.json has {name} {value!r}, where a whole number above 0 is needed")
        return value

    if (num_layers := size("num_hidden_layers", 1)) != 1:
        raise BadHead(f"{source} has {num_layers} layers; EAGLE heads of one layer are served")
    if (activation := option("hidden_act", "silu")) != "silu":
        raise BadHead(f"{source} has hidden_act {activation!r}; only 'silu' is served")
    if option("use_aux_hidden_state", True) is False:
        raise BadHead(f"{source}: use_aux_hidden_state false (an EAGLE-3 layer on the last hidden state only) is not served")
    for name, expected in (("target_hidden_size", target_hidden_size), ("vocab_size", target_vocab_size)):
        if (stated := option(name, expected)) != expected:
            raise BadHead(f"{source} was made for a target with {name.removeprefix('target_')} {stated}; this one has {expected}")
    num_heads, hidden_size = size("num_attention_heads"), size("hidden_size")
    settings = EagleSettings(
        is_eagle3=is_eagle3,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=size("num_key_value_heads", num_heads),
        head_dim=size("head_dim", hidden_size // num_heads),
        intermediate_size=size("intermediate_size"),
        norm_eps=float(option("rms_norm_eps", 1e-6)),
        rope_parameters=_rope(layer, source),
        max_positions=size("max_position_embeddings", 2048),
        window=option("sliding_window", None) if "sliding_attention" in (option("layer_types", None) or ()) else None,
        layer_ids=_layer_ids(option("eagle_aux_hidden_state_layer_ids", None), source, num_target_layers)
        if is_eagle3
        else (num_target_layers,),
        draft_vocab_size=option("draft_vocab_size", None),
        has_bias=option("bias", None),
        norm_before_residual=bool(option("norm_before_residual", False)),
        norm_output=bool(option("norm_output", False)),
        norm_before_fc=bool(option("norm_before_fc", False)),
        fc_norm=bool(option("fc_norm", False)),
    )
    if settings.norm_before_fc and settings.fc_norm:
        raise BadHead(f"{source}: norm_before_fc and fc_norm exclude each other")
    if not is_eagle3 and hidden_size != target_hidden_size:
        raise BadHead(f"{source} has hidden_size {hidden_size}; an EAGLE-1 head has the target's, {target_hidden_size}")
    return settings


def _layer_ids(stated: Any, source: str, num_layers: int) -> tuple[int, ...]:
    """The default is that of EAGLE-3's authors: near the beginning, in the middle, near the end."""
    ids = (2, num_layers // 2, num_layers - 3) if stated is None else tuple(stated)
    if not ids or not all(isinstance(layer, int) and 0 <= layer <= num_layers for layer in ids):
        raise BadHead(f"{source} reads the hidden states {list(ids)}; the target has those from 0 to {num_layers}")
    return ids


def _rope(layer: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    found = layer.get("rope_parameters") or {"rope_theta": layer.get("rope_theta", 10000.0), **(layer.get("rope_scaling") or {})}
    parameters = {"rope_theta": layer.get("rope_theta", 10000.0), **found}
    parameters["rope_type"] = parameters.get("rope_type") or parameters.pop("type", None) or "default"
    if parameters["rope_type"] in LENGTH_DEPENDENT_ROPE:
        raise BadHead(f"{source} has rope of type {parameters['rope_type']!r}, which changes with the length of each sequence")
    return parameters
