"""Keys of a Serve config that Serve itself would silently ignore."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from cluster.local.preflight import LaunchError


def check_serve_keys(config: Mapping[str, Any]) -> None:
    """Raises LaunchError for the first key that Serve's schema does not have. `args` are free here: they are the application's."""
    from ray.serve.schema import ServeDeploySchema  # takes seconds, and nothing else of the launcher needs Ray

    unknown = next(_unknown_keys(config, ServeDeploySchema, ""), None)
    if unknown is not None:
        raise LaunchError(unknown)


def _unknown_keys(value: object, schema: type[BaseModel], path: str) -> Iterator[str]:
    """One line for each unknown key, outermost first."""
    if not isinstance(value, Mapping):
        return  # a wrong type is Serve's to refuse, and it does
    fields = {**schema.model_fields, **{field.alias: field for field in schema.model_fields.values() if field.alias}}
    for key in value:
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys are {', '.join(sorted(fields))}"
            yield f"{path}{key}: unknown key; {hint}"
    for key, inner in value.items():
        for nested in _schemas(fields[key].annotation) if key in fields else ():
            if isinstance(inner, list):
                for index, item in enumerate(inner):
                    yield from _unknown_keys(item, nested, f"{path}{key}[{index}].")
            else:
                yield from _unknown_keys(inner, nested, f"{path}{key}.")


def _schemas(annotation: Any) -> list[type[BaseModel]]:
    """The schema inside an annotation (a list of it, or it or None). None for several kinds: only Serve knows which one is meant."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    found = [schema for argument in get_args(annotation) for schema in _schemas(argument)]
    return found if len(found) == 1 else []
