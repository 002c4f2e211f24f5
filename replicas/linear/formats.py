"""The format of a checkpoint's linears. Only this module decides it, from `quantization_config` in config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from replicas.linear.method import LinearMethod
from replicas.model_support import UnsupportedModel

Format = Callable[[str, Callable[[str], bool]], LinearMethod | None]
"""Maps a linear module's name, and a test whether the checkpoint has a tensor under that name, to its method; None for dense."""

FORMATS: dict[str, Callable[[Mapping[str, Any]], Format]] = {}
"""quant_method -> reader of the rest of `quantization_config`. No format of other quantizers is served yet."""


def stored_format(config: Any) -> Format | None:
    """The format of a model's linears by its transformers configuration; None when the checkpoint is dense. Raises UnsupportedModel
    with the quant_method for a format that is not served."""
    found = _quantization_config(config)
    if found is None:
        return None
    values = found if isinstance(found, Mapping) else found.to_dict()
    name = getattr(values.get("quant_method"), "value", values.get("quant_method"))
    if name not in FORMATS:
        served = f"; formats that are: {', '.join(sorted(FORMATS))}" if FORMATS else ""
        raise UnsupportedModel(
            f"model type {config.model_type!r} has weights quantized with quant_method {name!r}, which is not served{served}; load the "
            "unquantized checkpoint, with `quantization: int8` or int4 if memory is short"
        )
    return FORMATS[name](values)


def _quantization_config(config: Any) -> Any:
    configs = (config, config.get_text_config(decoder=True))
    names = ("quantization_config", "compression_config")
    return next((found for one in configs for name in names if (found := getattr(one, name, None))), None)
