"""The table from exceptions to answers, and how OpenAI's dialects write them."""

from __future__ import annotations

import json
import logging

import pytest
from starlette.exceptions import HTTPException

from cluster.failures import (
    BadRequest,
    BodyTooLarge,
    DecisionNotFound,
    GenerationFailed,
    ModelNotFound,
    Overloaded,
    ReplicaGone,
    RouterGone,
    Unavailable,
    answer_for,
)
from cluster.protocols.dialect import Dialect
from cluster.protocols.openai.chat import ChatDialect
from cluster.protocols.openai.completions import CompletionDialect
from replicas.request import RequestRejected
from replicas.text.tokenizer import ChatTemplateError
from tests.unit.openai_schemas import check_schema


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (BadRequest("no", param="n", code="invalid_value"), 400, "invalid_request_error", "n", "invalid_value"),
        (ChatTemplateError("roles must alternate"), 400, "invalid_request_error", "messages", "invalid_chat_template_input"),
        (RequestRejected("too long"), 400, "invalid_request_error", None, "request_rejected"),
        (ModelNotFound("x", ("a", "b")), 404, "invalid_request_error", "model", "model_not_found"),
        (DecisionNotFound("x"), 404, "invalid_request_error", "request_id", "decision_not_found"),
        (BodyTooLarge("big"), 413, "invalid_request_error", None, "body_too_large"),
        (Overloaded("full", 2.0), 429, "rate_limit_error", None, "rate_limit_exceeded"),
        (Unavailable("down"), 503, "service_unavailable_error", None, "unavailable"),
        (RouterGone("restarting"), 503, "service_unavailable_error", None, "unavailable"),
        (ReplicaGone("r", "died"), 503, "service_unavailable_error", None, "unavailable"),
        (GenerationFailed("NaN"), 500, "server_error", None, "generation_failed"),
        (HTTPException(404), 404, "invalid_request_error", None, "unknown_url"),
        (HTTPException(405), 405, "invalid_request_error", None, "method_not_allowed"),
        (HTTPException(418, "teapot"), 418, "invalid_request_error", None, None),
        (HTTPException(502), 502, "server_error", None, None),
    ],
)
@pytest.mark.parametrize("dialect", [ChatDialect(), CompletionDialect()], ids=["chat", "text"])
def test_each_cause_has_its_status_and_a_valid_body(
    dialect: Dialect, error: Exception, status: int, kind: str, param: str | None, code: str | None
) -> None:
    answer = answer_for(error, "r")
    body = dialect.error_body(answer)
    check_schema("ErrorResponse", body)
    assert answer.status == status
    assert body["error"] == {"message": answer.message, "type": kind, "param": param, "code": code}
    assert dialect.error_event(answer) == b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def test_label_of_an_answer_without_a_code_is_its_kind() -> None:
    assert answer_for(HTTPException(418, "teapot"), "r").label == "invalid_request"
    assert answer_for(Unavailable("down"), "r").label == "unavailable"


@pytest.mark.parametrize(("retry_after_s", "header"), [(0.2, "1"), (2.0, "2"), (2.1, "3")])
def test_retry_after_is_whole_seconds_and_never_early(retry_after_s: float, header: str) -> None:
    assert answer_for(Overloaded("full", retry_after_s), "r").headers == {"Retry-After": header}


def test_unknown_exception_is_logged_and_told_without_details(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    answer = answer_for(KeyError("secret"), "req-7")
    assert answer.status == 500
    assert "secret" not in answer.message
    assert "req-7" in answer.message
    assert "secret" in caplog.text


def test_message_of_several_lines_becomes_one() -> None:
    assert answer_for(ChatTemplateError("line one\n  line two"), "r").message == "line one line two"
