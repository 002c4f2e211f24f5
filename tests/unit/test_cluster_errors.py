"""The table from exceptions to HTTP answers."""

from __future__ import annotations

import logging

import pytest
from starlette.exceptions import HTTPException

from cluster.failures import (
    BadRequest,
    BodyTooLarge,
    GenerationFailed,
    ModelNotFound,
    Overloaded,
    ReplicaGone,
    RouterGone,
    Unavailable,
    answer_for,
)
from replicas.request import RequestRejected
from replicas.text.tokenizer import ChatTemplateError
from tests.unit.openai_schemas import check_schema


@pytest.mark.parametrize(
    ("error", "status", "param", "code"),
    [
        (BadRequest("no", param="n", code="invalid_value"), 400, "n", "invalid_value"),
        (ChatTemplateError("roles must alternate"), 400, "messages", "invalid_chat_template_input"),
        (RequestRejected("too long"), 400, None, "request_rejected"),
        (ModelNotFound("x", ("a", "b")), 404, "model", "model_not_found"),
        (BodyTooLarge("big"), 413, None, "body_too_large"),
        (Overloaded("full", 2.0), 429, None, "rate_limit_exceeded"),
        (Unavailable("down"), 503, None, "unavailable"),
        (RouterGone("restarting"), 503, None, "unavailable"),
        (ReplicaGone("r", "died"), 503, None, "unavailable"),
        (GenerationFailed("NaN"), 500, None, "generation_failed"),
        (HTTPException(404), 404, None, "unknown_url"),
        (HTTPException(405), 405, None, "method_not_allowed"),
        (HTTPException(418, "teapot"), 418, None, None),
    ],
)
def test_each_cause_has_its_status_and_a_valid_body(error: Exception, status: int, param: str | None, code: str | None) -> None:
    answer = answer_for(error, "r")
    check_schema("ErrorResponse", answer.body())
    assert (answer.status, answer.param, answer.code) == (status, param, code)


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
