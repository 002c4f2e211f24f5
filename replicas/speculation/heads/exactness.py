"""Options of heads and of other engines that would change a model's output. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INEXACT_OPTIONS: Mapping[str, float | None] = {
    "accept_tolerance": 0.0,
    "verifier_accept_k": 1,
    "posterior_threshold": None,
    "posterior_alpha": None,
    "typical_acceptance_sampler_posterior_threshold": None,
    "typical_acceptance_sampler_posterior_alpha": None,
}
"""Option -> its one exact value; None if it has none. All accept tokens that the target would not have drawn."""


def inexact_option(config: Any) -> str | None:
    """`name=value` of the first option, at any depth, that accepts other tokens than the target's own; None if there is none."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            if name in INEXACT_OPTIONS and value is not None and value != INEXACT_OPTIONS[name]:
                return f"{name}={value!r}"
    inner = config.values() if isinstance(config, Mapping) else config if isinstance(config, list) else ()
    return next((found for value in inner if (found := inexact_option(value)) is not None), None)
