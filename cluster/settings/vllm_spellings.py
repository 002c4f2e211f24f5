"""Keys that users of vLLM know, as the keys that stand for them here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from replicas.speculation_config import from_vllm

SPECULATIVE_CONFIG = "speculative_config"


def in_own_words(args: Mapping[str, Any]) -> dict[str, Any]:
    """The args with each `engine.speculative_config` as `engine.speculation`. Raises ValueError with the key's path.

    Whatever has another shape than expected stays as it is: it is judged with all other keys.
    """
    models = args.get("models")
    if not isinstance(models, list | tuple):
        return dict(args)
    return {**args, "models": [_model(model, f"models[{index}]") for index, model in enumerate(models)]}


def _model(model: Any, path: str) -> Any:
    """A model's section, or one of its pools'."""
    if not isinstance(model, Mapping):
        return model
    told = {key: _model(value, f"{path}.{key}") if key in ("prefill", "decode") else value for key, value in model.items()}
    engine = model.get("engine")
    if isinstance(engine, Mapping) and SPECULATIVE_CONFIG in engine:
        key = f"{path}.engine.{SPECULATIVE_CONFIG}"
        if "speculation" in engine:
            raise ValueError(f"{key}: means the same as speculation; leave one of them out")
        config = engine[SPECULATIVE_CONFIG]
        if not isinstance(config, Mapping):
            raise ValueError(f"{key}: must be a mapping, got {config!r}")
        try:
            speculation = asdict(from_vllm(config))
        except ValueError as error:
            raise ValueError(f"{path}.engine.{error}") from error
        told["engine"] = {**{name: value for name, value in engine.items() if name != SPECULATIVE_CONFIG}, "speculation": speculation}
    return told
