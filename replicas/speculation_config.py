"""Settings of speculative decoding as the user gives them. Free of torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

logger = logging.getLogger(__name__)

SpeculationMethod = Literal["none", "auto", "ngram", "suffix", "draft_model", "twin", "medusa", "eagle"]

METHODS_WITH_MODEL = frozenset({"draft_model", "medusa", "eagle"})
MAX_DRAFTS = 64
"""Largest `max_tokens`: more drafts of one request never pay, and each is a row of logits."""

_UNSERVED: Mapping[str, str] = {
    "mtp": "the model families that have such modules are not served",
    "deepseek_mtp": "the model families that have such modules are not served",
    "early_exit": "it needs models that were trained for it",
    "layerskip": "it needs models that were trained for it",
    "mlp_speculator": "its layout is not read; use a Medusa or EAGLE head",
    "peagle": "heads that draft a block in one pass are not read; use an EAGLE head",
    "dflash": "heads that draft a block in one pass are not read; use an EAGLE head",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """How an engine drafts tokens. Output is the same with every setting; only its speed differs.

    How many tokens are drafted is decided for each request and step from measured acceptance and cost, and is often none.
    """

    method: SpeculationMethod = "none"
    """none: no drafts. ngram: copies what followed the newest tokens earlier in the request. suffix: the same with matches of any
    length, and in finished answers of the same tenant. draft_model: a small model with mostly the same tokens. twin: the target in `twin`
    integers. medusa, eagle: trained heads. auto: suffix, and with `model` the method that its files belong to."""
    max_tokens: int = 16
    """Most drafts of a request in one step."""
    model: str | None = None
    """Folder or Hugging Face id of the draft model or head; needed by draft_model, medusa and eagle, unknown to the others."""
    twin: Literal["int8", "int4"] = "int4"
    """Weights of the twin."""
    max_suffix_tokens: int = 1 << 18
    """Most tokens of finished answers that `suffix` remembers, all tenants together; the oldest answers leave first. 0 remembers none."""

    def __post_init__(self) -> None:
        if self.method in _UNSERVED:
            raise ValueError(f"method {self.method!r} is not supported: {_UNSERVED[self.method]}")
        if self.method not in get_args(SpeculationMethod):
            raise ValueError(f"method must be one of {', '.join(get_args(SpeculationMethod))}, got {self.method!r}")
        if not 1 <= self.max_tokens <= MAX_DRAFTS:
            raise ValueError(f"max_tokens must be from 1 to {MAX_DRAFTS}, got {self.max_tokens}; use method none for no drafts")
        if self.method in METHODS_WITH_MODEL and not self.model:
            raise ValueError(f"method {self.method!r} needs model: the folder or Hugging Face id of its weights")
        if self.model and self.method not in METHODS_WITH_MODEL | {"auto"}:
            raise ValueError(
                f"model is for the methods {', '.join(sorted(METHODS_WITH_MODEL))} and auto, not {self.method!r}; leave it out"
            )
        if self.twin not in ("int8", "int4"):
            raise ValueError(f"twin must be int8 or int4, got {self.twin!r}")
        if self.max_suffix_tokens < 0:
            raise ValueError(f"max_suffix_tokens must be at least 0, got {self.max_suffix_tokens}")


def speculation_of(value: SpeculationConfig | Mapping[str, Any] | str) -> SpeculationConfig:
    """From a method's name or a mapping of settings too. Raises ValueError naming the setting."""
    if isinstance(value, SpeculationConfig):
        return value
    settings: Mapping[str, Any] = {"method": value} if isinstance(value, str) else value
    known = [field.name for field in fields(SpeculationConfig)]
    if unknown := sorted(settings.keys() - set(known)):
        raise ValueError(f"speculation has no setting {', '.join(unknown)}; allowed are {', '.join(known)}")
    try:
        return SpeculationConfig(**settings)
    except ValueError as error:
        raise ValueError(f"speculation.{error}") from error


_VLLM_METHODS: Mapping[str, SpeculationMethod] = {
    "ngram": "ngram",
    "[ngram]": "ngram",
    "suffix": "suffix",
    "draft_model": "draft_model",
    "medusa": "medusa",
    "eagle": "eagle",
    "eagle3": "eagle",
}
_VLLM_TUNING = frozenset(
    {
        "prompt_lookup_max", "prompt_lookup_min", "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob", "disable_by_batch_size", "disable_padded_drafter_batch",
        "num_speculative_tokens_per_batch_size", "enforce_eager", "max_model_len",
    }
)  # fmt: skip
"""Keys that change vLLM's speed alone. Here the engine measures what they fix by hand."""
_VLLM_INEXACT = frozenset(
    {"posterior_threshold", "posterior_alpha", "typical_acceptance_sampler_posterior_threshold",
     "typical_acceptance_sampler_posterior_alpha", "synthetic_acceptance_rate", "synthetic_acceptance_rates"}
)  # fmt: skip
_EXACT_VALUES: Mapping[str, tuple[object, ...]] = {
    "acceptance_method": ("rejection_sampler",),
    "draft_token_acceptance_method": ("rejection_sampler",),
    "rejection_sample_method": ("strict", "standard", "probabilistic"),
    "draft_sample_method": ("greedy", "probabilistic"),
    "draft_tensor_parallel_size": (1, None),
}
"""Values that do not change the output, or that describe what happens here too."""


def from_vllm(config: Mapping[str, Any]) -> SpeculationConfig:
    """From vLLM's `speculative_config`. Raises ValueError for keys that are unknown or would change the output."""
    left = dict(config)
    model = left.pop("model", None)
    method = left.pop("method", None) or (model if model in _VLLM_METHODS else "draft_model" if model else None)
    if isinstance(method, str) and method in _UNSERVED:
        raise ValueError(f"speculative_config.method {method!r} is not supported: {_UNSERVED[method]}")
    if not isinstance(method, str) or method not in _VLLM_METHODS:
        raise ValueError(f"speculative_config.method must be one of {', '.join(_VLLM_METHODS)}, got {method!r}")
    num_tokens = left.pop("num_speculative_tokens", None)
    if num_tokens is not None and (isinstance(num_tokens, bool) or not isinstance(num_tokens, int)):
        raise ValueError(f"speculative_config.num_speculative_tokens must be a whole number, got {num_tokens!r}")
    for key in sorted(left):
        if key in _VLLM_INEXACT or (key in _EXACT_VALUES and left[key] not in _EXACT_VALUES[key]):
            raise ValueError(f"speculative_config.{key}: {left[key]!r} is not supported: drafts never change the output here; leave it out")
        if key not in _VLLM_TUNING | _EXACT_VALUES.keys():
            raise ValueError(f"speculative_config.{key}: unknown key; allowed are method, model and num_speculative_tokens")
    if tuning := sorted(left.keys() & _VLLM_TUNING):
        logger.warning("speculative_config: %s have no effect: the engine measures when and how much to draft", ", ".join(tuning))
    chosen = _VLLM_METHODS[method]
    try:
        return SpeculationConfig(
            method=chosen,
            model=model if chosen in METHODS_WITH_MODEL else None,
            max_tokens=SpeculationConfig().max_tokens if num_tokens is None else num_tokens,
        )
    except ValueError as error:
        raise ValueError(f"speculative_config: {error}") from error
