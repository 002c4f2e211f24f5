"""How a body becomes a checked model: strict types, no unknown names, and one OpenAI-style error for the first fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, from_json

from cluster.errors import BadRequest

Model = TypeVar("Model", bound="WireModel")


class WireModel(BaseModel):
    """A request body. Types are strict: "0.5" is not a number and 1 is not a boolean; null means absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises BadRequest for anything else (RFC 8259: no NaN, UTF-8 only, bounded nesting)."""
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
        raise _bad_request(error.errors(include_url=False, include_context=False)[0]) from error


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
    allowed = f" Leave it out or send {' or '.join(map(repr, neutral_values))}." if neutral_values else " Leave it out."
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


def _bad_request(error: ErrorDetails) -> BadRequest:
    param = _param(error["loc"])
    kind, message = error["type"], error["msg"]
    if kind == "extra_forbidden":
        return BadRequest(f"Unrecognized request argument supplied: {param}", param=param, code="unknown_parameter")
    if kind == "missing":
        return BadRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return BadRequest(f"Invalid value for '{param}': {_plain(message)}, got {_shown(error['input'])}.", param=param, code=code)


def _param(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") -> "messages[0].content"."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text[:200]


def _plain(message: str) -> str:
    message = message.removeprefix("Value error, ").rstrip(".")
    return message[:1].lower() + message[1:]


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return json_type(value)
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
