"""Validation of answers against a schema of ours, and against OpenAI's published description where the machine has it."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from jsonschema import Draft202012Validator
from jsonschema.protocols import Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from tests.data_paths import OPENAI_DESCRIPTION, OWN_DATA, PUBLIC_DATA, has_public


@cache
def _validators(name: str) -> list[Validator]:
    found = [_validator(OWN_DATA / "openai_answers.schema.json", f"$defs/{name}")]
    if has_public(OPENAI_DESCRIPTION):
        found.append(_validator(PUBLIC_DATA / OPENAI_DESCRIPTION, f"components/schemas/{name}"))
    return found


def _validator(file: Path, pointer: str) -> Validator:
    return Draft202012Validator({"$ref": f"urn:{file.name}#/{pointer}"}, registry=_registry(file))


@cache
def _registry(file: Path) -> Registry[Any]:
    resource = Resource(contents=json.loads(file.read_text()), specification=DRAFT202012)
    return Registry().with_resource(f"urn:{file.name}", resource)


def described_parameters(name: str) -> set[str]:
    """Names of the properties of an object of the published description, those of the parts of an `allOf` included."""
    file = PUBLIC_DATA / OPENAI_DESCRIPTION
    schemas = _registry(file).contents(f"urn:{file.name}")["components"]["schemas"]

    def collect(schema: dict[str, Any]) -> set[str]:
        if "$ref" in schema:
            return collect(schemas[schema["$ref"].rsplit("/", 1)[1]])
        return {*schema.get("properties", ()), *(key for part in schema.get("allOf", ()) for key in collect(part))}

    return collect(schemas[name])


def check_schema(name: str, value: object) -> None:
    """Raises jsonschema's ValidationError when `value` does not match the schemas of that name."""
    for validator in _validators(name):
        validator.validate(value)


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


def check_error(response: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    check_schema("ErrorResponse", body)
    assert body["error"]["param"] == param
    assert "\n" not in body["error"]["message"]
    return body["error"]
