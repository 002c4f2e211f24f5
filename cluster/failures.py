"""Every way a request can fail at the gateway, and the one table from failures to answers. Each dialect writes them in its own shape."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus

from starlette.exceptions import HTTPException

from replicas.request import RequestRejected
from replicas.text.tokenizer import ChatTemplateArgumentError, ChatTemplateError

logger = logging.getLogger(__name__)


class BadRequest(ValueError):
    """The body is invalid; `param` is the path of the field ("messages[0].content")."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class BodyTooLarge(Exception):
    """The body has more bytes than the gateway accepts."""


class UnsupportedMediaType(Exception):
    """The body is of a type, or in a coding, that the gateway does not read. `headers` say which ones it does."""

    def __init__(self, message: str, *, code: str, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.code = code
        self.headers = headers


class UnsupportedTransferCoding(Exception):
    """The body was sent in a way that HTTP allows and the gateway does not read (RFC 9112, section 6.1)."""


class ModelNotFound(Exception):
    """No model of that name is served here. Not raised while a known model is starting: that is Unavailable."""

    def __init__(self, name: str, served: tuple[str, ...]) -> None:
        super().__init__(f"The model {name[:200]!r} does not exist. Served here: {', '.join(served)}.")


class DecisionNotFound(Exception):
    """The router has no decision for this request id; it keeps only the most recent ones."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"No decision on {request_id[:200]!r} is kept: use the `id` of an answer (chatcmpl-..., not X-Request-Id; the access log has "
            "both); only recent decisions are kept."
        )


class Overloaded(Exception):
    """The router's queue is at its limit; the client should retry after `retry_after_s`."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Unavailable(Exception):
    """The request cannot be served now: no replica, no router, or a death of a replica on every attempt."""

    def __init__(self, reason: str, retry_after_s: float = 2.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class ModelRemoved(Unavailable):
    """The configuration has the model no more: no replica of it will come, however long a request waits."""


class GenerationFailed(Exception):
    """The engine accepted the request but could not finish it (a numerical fault), or every replica that ran it died. Another
    attempt would fail too."""


class ReplicaGone(Exception):
    """The chosen replica cannot continue the request. Another decision may succeed.

    Not raised when the engine itself rejects or fails a request: that is RequestRejected or a progress that is FAILED.
    """

    def __init__(self, replica_id: str, reason: str) -> None:
        super().__init__(f"replica {replica_id} is gone: {reason}")
        self.replica_id = replica_id


class ReplicaDied(ReplicaGone):
    """The replica died or hangs while it had the request, which may be the cause."""


class ReplicaHung(ReplicaDied):
    """The replica hangs: the router has fenced it."""


class ReplicaLeft(ReplicaGone):
    """The replica never accepted the request, or gave it back, e.g. because it drains. The request is not the cause."""


class RouterGone(Exception):
    """The router died or did not answer. It is restarted and rebuilt from reports within seconds."""


class ErrorKind(StrEnum):
    """Kinds of errors, by the client's possible reaction; each dialect has its own names for them."""

    INVALID_REQUEST = "invalid_request"
    NOT_FOUND = "not_found"
    TOO_LARGE = "too_large"
    RATE_LIMIT = "rate_limit"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    """One error, independent of the dialect."""

    status: int
    message: str
    kind: ErrorKind
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """A short name for logs and metrics."""
        return self.code or self.kind.value


@dataclass(frozen=True, slots=True)
class _Row:
    status: int
    kind: ErrorKind
    code: str | None = None
    param: str | None = None


# Exception class -> answer; the first row that matches wins.
_TABLE: tuple[tuple[type[Exception], _Row], ...] = (
    (BadRequest, _Row(400, ErrorKind.INVALID_REQUEST)),
    (ChatTemplateArgumentError, _Row(400, ErrorKind.INVALID_REQUEST, "invalid_value", "chat_template_kwargs")),
    (ChatTemplateError, _Row(400, ErrorKind.INVALID_REQUEST, "invalid_chat_template_input", "messages")),
    (RequestRejected, _Row(400, ErrorKind.INVALID_REQUEST, "request_rejected")),
    (ModelNotFound, _Row(404, ErrorKind.NOT_FOUND, "model_not_found", "model")),
    (DecisionNotFound, _Row(404, ErrorKind.NOT_FOUND, "decision_not_found", "request_id")),
    (BodyTooLarge, _Row(413, ErrorKind.TOO_LARGE, "body_too_large")),
    (UnsupportedMediaType, _Row(415, ErrorKind.INVALID_REQUEST)),
    (UnsupportedTransferCoding, _Row(501, ErrorKind.INVALID_REQUEST, "unsupported_transfer_encoding")),
    (Overloaded, _Row(429, ErrorKind.RATE_LIMIT, "rate_limit_exceeded")),
    (Unavailable, _Row(503, ErrorKind.UNAVAILABLE, "unavailable")),
    (RouterGone, _Row(503, ErrorKind.UNAVAILABLE, "unavailable")),
    (ReplicaGone, _Row(503, ErrorKind.UNAVAILABLE, "unavailable")),
    (GenerationFailed, _Row(500, ErrorKind.INTERNAL, "generation_failed")),
)


def answer_for(error: Exception, request_id: str) -> ErrorAnswer:
    """The answer to `error`. An exception without a row is a bug of ours: logged with its traceback, answered with a plain 500."""
    if isinstance(error, HTTPException):
        return _http_answer(error)
    for cause, row in _TABLE:
        if isinstance(error, cause):
            param = getattr(error, "param", None) or row.param
            code = getattr(error, "code", None) or row.code
            return ErrorAnswer(status=row.status, message=_one_line(error), kind=row.kind, param=param, code=code, headers=_headers(error))
    logger.error("request %s failed", request_id, exc_info=error)
    return ErrorAnswer(
        status=500,
        message=f"Internal error; the server's log has it under request {request_id}.",
        kind=ErrorKind.INTERNAL,
        code="internal_error",
    )


# Status -> kind and code of answers that the framework or Serve's proxy makes; others go by their hundred.
_HTTP: dict[int, tuple[ErrorKind, str | None]] = {
    404: (ErrorKind.NOT_FOUND, "unknown_url"),
    405: (ErrorKind.INVALID_REQUEST, "method_not_allowed"),
    408: (ErrorKind.UNAVAILABLE, "request_timeout"),
    413: (ErrorKind.TOO_LARGE, "body_too_large"),
    429: (ErrorKind.RATE_LIMIT, "rate_limit_exceeded"),
    500: (ErrorKind.INTERNAL, "internal_error"),
    503: (ErrorKind.UNAVAILABLE, "unavailable"),
}


def _http_answer(error: HTTPException) -> ErrorAnswer:
    status = error.status_code
    phrase = HTTPStatus(status).phrase if not error.detail else str(error.detail)
    other = (ErrorKind.INTERNAL if status >= 500 else ErrorKind.INVALID_REQUEST, None)
    kind, code = _HTTP.get(status, other)
    return ErrorAnswer(status=status, message=phrase, kind=kind, code=code, headers=dict(error.headers or {}))


def _headers(error: Exception) -> dict[str, str]:
    retry_after_s = getattr(error, "retry_after_s", None)
    retry = {} if retry_after_s is None else {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
    return {**getattr(error, "headers", {}), **retry}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
