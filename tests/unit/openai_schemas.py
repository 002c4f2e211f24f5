"""Validation against OpenAI's published description, loaded once as one JSON Schema resource."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import httpx
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


def schema_properties(name: str) -> set[str]:
    """Names of the properties of an object, those of the parts of an `allOf` included."""
    schemas = _registry().contents(_URI)["components"]["schemas"]

    def collect(schema: dict[str, Any]) -> set[str]:
        if "$ref" in schema:
            return collect(schemas[schema["$ref"].rsplit("/", 1)[1]])
        return {*schema.get("properties", ()), *(key for part in schema.get("allOf", ()) for key in collect(part))}

    return collect(schemas[name])


def check_schema(name: str, value: object) -> None:
    """Raises jsonschema's ValidationError when `value` does not match the schema of that name."""
    _validator(name).validate(value)


def check_completion(value: dict[str, Any]) -> None:
    """As `check_schema("CreateCompletionResponse", value)`, but echoed log-probabilities begin with null, as those of the service
    itself do; its description knows numbers only."""
    value = copy.deepcopy(value)
    for choice in value["choices"]:
        for name, number in (("token_logprobs", 0.0), ("top_logprobs", {})):
            values = (choice["logprobs"] or {}).get(name)
            if values and values[0] is None:
                values[0] = number
    check_schema("CreateCompletionResponse", value)


def matches_schema(name: str, value: object) -> bool:
    return _validator(name).is_valid(value)


def check_error(response: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    check_schema("ErrorResponse", body)
    assert body["error"]["param"] == param
    assert "\n" not in body["error"]["message"]
    return body["error"]
