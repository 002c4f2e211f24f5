"""Which models are supported, decided from their configuration. Free of torch."""

from __future__ import annotations

from typing import Any

SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class UnsupportedModel(ValueError):
    """The model cannot be served correctly. The message names the model type and the reason."""


def check_supported(config: Any) -> None:
    """Raises UnsupportedModel for a model that paged causal attention cannot reproduce. `config` is a transformers PreTrainedConfig.

    A self-check after loading (`engine.loader`) finds differences that the configuration does not show.
    """
    text = config.get_text_config(decoder=True)
    name = f"model type {config.model_type!r}"
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; only decoder-only causal language models are served")
    layer_types = set(getattr(text, "layer_types", None) or ())
    if other := layer_types - SUPPORTED_LAYER_TYPES:
        raise UnsupportedModel(
            f"{name} has layers of type {', '.join(sorted(other))}; only {' and '.join(sorted(SUPPORTED_LAYER_TYPES))} are served"
        )
    for rope_type in _rope_types(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}):
        if rope_type in LENGTH_DEPENDENT_ROPE:
            raise UnsupportedModel(
                f"{name} has rope of type {rope_type!r}, which changes with the length of each sequence; packed steps cannot serve it"
            )


def _rope_types(parameters: dict[str, Any]) -> list[str]:
    """The types in one set of rope parameters, or in a mapping from layer type to such sets."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return [str(p.get("rope_type") or p.get("type")) for p in (nested or [parameters])]
