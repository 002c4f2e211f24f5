"""How a body becomes a checked model: strict types, no unknown names, and one OpenAI-style error for the first fault."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, from_json

from cluster.failures import BadRequest

Model = TypeVar("Model", bound="WireModel")


class WireModel(BaseModel):
    """A request body. Types are strict: "0.5" is not a number and 1 is not a boolean; null means absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises BadRequest for anything else (RFC 8259: no NaN, UTF-8 only, bounded nesting).

    A byte order mark before it is passed over, as RFC 8259 allows."""
    body = body.removeprefix(codecs.BOM_UTF8)
    if not body:
        raise BadRequest("The request has no body: send a JSON object.", code="invalid_json")
    try:
        parsed = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"We could not parse the JSON body of your request: {error}.", code="invalid_json") from error
    if not isinstance(parsed, dict):
        raise BadRequest(f"The JSON body must be an object, got {json_type(parsed)}.", code="invalid_json")
    return parsed


def parse_body(model: type[Model], fields: Mapping[str, Any]) -> Model:
    """Checks `fields` against `model`. Raises BadRequest naming the first field that is wrong."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _bad_request(error.errors(include_url=False)[0]) from error


def refuse_unsupported(fields: Mapping[str, Any], neutral_values: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Drops parameters that ask for nothing, refuses those that ask for what this server cannot do.

    `neutral_values` maps a parameter's name to the values that change nothing; null always does. Raises BadRequest.
    """
    kept = {}
    for name, value in fields.items():
        if name not in neutral_values:
            kept[name] = value
        elif value is not None and not any(type(value) is type(neutral) and value == neutral for neutral in neutral_values[name]):
            raise unsupported(name, neutral_values[name])
    return kept


def unsupported(param: str, neutral_values: tuple[Any, ...] = ()) -> BadRequest:
    allowed = f" Leave it out or send {' or '.join(map(json.dumps, neutral_values))}." if neutral_values else " Leave it out."
    return BadRequest(
        f"Unsupported parameter: '{param}' is not supported by this server.{allowed}", param=param, code="unsupported_parameter"
    )


def json_type(value: object) -> str:
    """The JSON name of a parsed value's type, for messages."""
    names = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)


def is_number_within(value: object, low: float, high: float) -> bool:
    """By comparison alone: JSON has integers that no float can hold. NaN lies in no range."""
    return not isinstance(value, bool) and isinstance(value, int | float) and low <= value <= high


_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "one of {expected}",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
}
"""Pydantic's kinds of errors in the words of JSON."""

_SIZES = {"string_too_long": "at most {max_length} {unit}", "too_long": "at most {max_length} {unit}", "too_short": "at least one entry"}


def _bad_request(error: ErrorDetails) -> BadRequest:
    param, kind, value, context = _param(error["loc"]), error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return BadRequest(f"Unrecognized request argument supplied: {param}", param=param, code="unknown_parameter")
    if kind == "missing":
        return BadRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if kind in _EXPECTED:
        limits = {name: int(limit) if isinstance(limit, float) and limit.is_integer() else limit for name, limit in context.items()}
        problem = f"must be {_EXPECTED[kind].format(**limits)}, got {shown(value)}"
    elif kind in _SIZES:
        unit = "characters" if isinstance(value, str) else "entries"
        problem = f"must have {_SIZES[kind].format(**context, unit=unit)}, got {len(value)}"
    else:  # our own validators say what they got
        text = error["msg"].removeprefix("Value error, ").rstrip(".")
        problem = text[:1].lower() + text[1:]
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return BadRequest(f"Invalid value for '{param}': {problem}.", param=param, code=code)


def _param(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") -> "messages[0].content". pydantic marks a wrong key of a mapping by a part of its own."""
    text = ""
    for part in location:
        if part == "[key]":
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text[:200]


def shown(value: object) -> str:
    """A value of the body as the client wrote it, cut to a line's length; of arrays and objects the type alone."""
    if isinstance(value, dict | list):
        return json_type(value)
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool | float | None) else str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
