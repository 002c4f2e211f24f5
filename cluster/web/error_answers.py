"""Exceptions of endpoints as answers, in the words of a dialect."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cluster.failures import answer_for
from cluster.generation.request_events import Failed
from cluster.protocols.dialect import Dialect
from cluster.web.disconnect import ClientDisconnected
from cluster.web.request_scope import Endpoint, state_of


def guarded(endpoint: Endpoint, dialect: Dialect) -> Endpoint:
    """The endpoint with every exception turned into an answer of `dialect`. The one place where all exceptions are caught."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnected:
            raise
        except Exception as error:  # noqa: BLE001 - the table has a row for all the rest, and logs it
            return error_response(request, error, dialect)

    answer.__name__ = getattr(endpoint, "__name__", "endpoint")
    return answer


def error_response(request: Request, error: Exception, dialect: Dialect) -> Response:
    state = state_of(request)
    answer = answer_for(_located(request, error), state.request_id)
    state.emit(Failed(at_s=state.clock(), code=answer.label))
    return JSONResponse(dialect.error_body(answer), status_code=answer.status, headers=answer.headers)


def _located(request: Request, error: Exception) -> Exception:
    """The router's own 404 and 405, which tell nothing, with the request that they are about."""
    if not isinstance(error, HTTPException) or error.status_code not in (404, 405):
        return error
    asked = f"{request.method} {request.url.path[:200]}"
    allowed = (error.headers or {}).get("Allow", "another method")
    detail = f"Invalid URL ({asked})." if error.status_code == 404 else f"Invalid method ({asked}): use {allowed}."
    return HTTPException(error.status_code, detail, headers=error.headers)
