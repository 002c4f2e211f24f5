"""Every way a request can fail at the gateway, and the one table that turns it into an answer. A dialect writes it in its shape."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus

from starlette.exceptions import HTTPException

from replicas.request import RequestRejected
from replicas.text.tokenizer import ChatTemplateArgumentError, ChatTemplateError

logger = logging.getLogger(__name__)


class BadRequest(ValueError):
    """The body can never be served as it is; `param` names the field by its path ("messages[0].content")."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class BodyTooLarge(Exception):
    """The body has more bytes than the gateway takes."""


class ModelNotFound(Exception):
    """No model of that name is served here. Not raised while a known model is starting: that is Unavailable."""

    def __init__(self, name: str, served: tuple[str, ...]) -> None:
        super().__init__(f"The model {name[:200]!r} does not exist. Served here: {', '.join(served)}.")


class DecisionNotFound(Exception):
    """The router keeps no decision on a request of that id; it knows only the last ones."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"No decision on {request_id[:200]!r} is kept: give the `id` of an answer (chatcmpl-..., not X-Request-Id; the access log has "
            "both), and only the last ones are known."
        )


class Overloaded(Exception):
    """The router's queue is at its limit; the client should come back after `retry_after_s`."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Unavailable(Exception):
    """Nothing can take the request now: no replica, no router, or replicas that died on every attempt."""

    def __init__(self, reason: str, retry_after_s: float = 2.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class ModelRemoved(Unavailable):
    """The configuration has the model no more: no replica of it will come, however long a request waits."""


class GenerationFailed(Exception):
    """The engine accepted the request and could not finish it (a numerical fault), or every replica that ran it died. Another
    attempt would fail as well."""


class ReplicaGone(Exception):
    """The chosen replica cannot go on with the request. Another decision may succeed.

    Not raised when the engine itself refuses or fails a request: those are RequestRejected and a FAILED progress.
    """

    def __init__(self, replica_id: str, reason: str) -> None:
        super().__init__(f"replica {replica_id} is gone: {reason}")
        self.replica_id = replica_id


class ReplicaDied(ReplicaGone):
    """It died, or hangs, while it had the request, which may be the reason."""


class ReplicaHung(ReplicaDied):
    """The router has fenced it."""


class ReplicaLeft(ReplicaGone):
    """It never took the request, or handed it back, e.g. because it drains. Nothing is said against the request."""


class RouterGone(Exception):
    """The router died or did not answer. It is restarted and rebuilt from reports within seconds."""


class ErrorKind(StrEnum):
    """Kinds of errors, by what a client can do about them; each dialect has its own words."""

    INVALID_REQUEST = "invalid_request"
    NOT_FOUND = "not_found"
    TOO_LARGE = "too_large"
    RATE_LIMIT = "rate_limit"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    """One error, in the words of no dialect."""

    status: int
    message: str
    kind: ErrorKind
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """For logs and metrics."""
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
    (Overloaded, _Row(429, ErrorKind.RATE_LIMIT, "rate_limit_exceeded")),
    (Unavailable, _Row(503, ErrorKind.UNAVAILABLE, "unavailable")),
    (RouterGone, _Row(503, ErrorKind.UNAVAILABLE, "unavailable")),
    (ReplicaGone, _Row(503, ErrorKind.UNAVAILABLE, "unavailable")),
    (GenerationFailed, _Row(500, ErrorKind.INTERNAL, "generation_failed")),
)


def answer_for(error: Exception, request_id: str) -> ErrorAnswer:
    """The answer to give for `error`. An exception that no row names is our bug: logged whole, told as a plain 500."""
    if isinstance(error, HTTPException):
        return _http_answer(error)
    for cause, row in _TABLE:
        if isinstance(error, cause):
            param = getattr(error, "param", None) or row.param
            code = getattr(error, "code", None) or row.code
            return ErrorAnswer(
                status=row.status, message=_one_line(error), kind=row.kind, param=param, code=code, headers=_retry_headers(error)
            )
    logger.error("request %s failed", request_id, exc_info=error)
    return ErrorAnswer(
        status=500,
        message=f"Internal error; the server's log has it under request {request_id}.",
        kind=ErrorKind.INTERNAL,
        code="internal_error",
    )


def _http_answer(error: HTTPException) -> ErrorAnswer:
    status = error.status_code
    phrase = HTTPStatus(status).phrase if not error.detail else str(error.detail)
    kind = ErrorKind.INTERNAL if status >= 500 else ErrorKind.NOT_FOUND if status == 404 else ErrorKind.INVALID_REQUEST
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    return ErrorAnswer(status=status, message=phrase, kind=kind, code=codes.get(status), headers=dict(error.headers or {}))


def _retry_headers(error: Exception) -> dict[str, str]:
    retry_after_s = getattr(error, "retry_after_s", None)
    return {} if retry_after_s is None else {"Retry-After": str(max(1, math.ceil(retry_after_s)))}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
