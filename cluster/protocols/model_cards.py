"""GET /v1/models: the served models, in the shape that OpenAI gave them and others took over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.models.served_model import ServedModel


def model_card(model: ServedModel) -> dict[str, Any]:
    """A `Model`, with the context length beside it."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "manta",
        "max_model_len": model.description.max_model_len,
    }


def model_list(models: Sequence[ServedModel]) -> dict[str, Any]:
    """A `ListModelsResponse`."""
    return {"object": "list", "data": [model_card(model) for model in models]}
