"""Validation against OpenAI's published description, loaded once as one JSON Schema resource."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.protocols import Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from tests.data_paths import SHARED_DATA

_URI = "urn:openai"


@cache
def _registry() -> Registry[Any]:
    document = json.loads((SHARED_DATA / "api" / "openai_openapi_core.json").read_text())
    return Registry().with_resource(_URI, Resource(contents=document, specification=DRAFT202012))


@cache
def _validator(name: str) -> Validator:
    return Draft202012Validator({"$ref": f"{_URI}#/components/schemas/{name}"}, registry=_registry())


def check_schema(name: str, value: object) -> None:
    """Raises jsonschema's ValidationError when `value` does not match the schema of that name."""
    _validator(name).validate(value)


def matches_schema(name: str, value: object) -> bool:
    return _validator(name).is_valid(value)
