"""Errors as OpenAI's `ErrorResponse`: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from cluster.failures import ErrorAnswer, ErrorKind
from cluster.protocols.server_sent_events import json_event

_TYPES = {
    ErrorKind.INVALID_REQUEST: "invalid_request_error",
    ErrorKind.NOT_FOUND: "invalid_request_error",
    ErrorKind.TOO_LARGE: "invalid_request_error",
    ErrorKind.RATE_LIMIT: "rate_limit_error",
    ErrorKind.UNAVAILABLE: "service_unavailable_error",
    ErrorKind.INTERNAL: "server_error",
}


class ErrorWriter:
    """The half of a Dialect that all of OpenAI's endpoints share."""

    def error_body(self, answer: ErrorAnswer) -> dict[str, Any]:
        return {"error": {"message": answer.message, "type": _TYPES[answer.kind], "param": answer.param, "code": answer.code}}

    def error_event(self, answer: ErrorAnswer) -> bytes:
        return json_event(self.error_body(answer))
