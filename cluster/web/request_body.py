"""Reads a request's body without trusting its size, its type or its coding."""

from __future__ import annotations

import asyncio
import re

from starlette.datastructures import Headers
from starlette.requests import Request

from cluster.failures import BodyTooLarge, UnsupportedMediaType, UnsupportedTransferCoding
from cluster.web.body_ahead import body_sent_ahead
from cluster.web.content_coding import IDENTITY, coding_of, decoded

_JSON = re.compile(r"application/([\w.+-]+\+)?json", re.ASCII)
_FORM = "application/x-www-form-urlencoded"


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body, decoded. Raises BodyTooLarge as soon as its length, told, counted or decoded, exceeds `max_bytes`, and
    UnsupportedMediaType, UnsupportedTransferCoding and BadRequest for what cannot be read."""
    _check_media_type(request.headers)
    _check_transfer_coding(request.headers)
    coding = coding_of(",".join(request.headers.getlist("content-encoding")))
    body = await _read(request, max_bytes)
    if coding == IDENTITY or not body:
        return body
    return await asyncio.to_thread(decoded, body, coding, max_bytes)


def _check_media_type(headers: Headers) -> None:
    """JSON, or none. curl's `-d` says that it sends a form: that is believed to be JSON too, unless it comes from a web page, which
    could send it across origins without asking."""
    named = headers.get("content-type", "")
    media_type = named.partition(";")[0].strip().lower()
    if not media_type or _JSON.fullmatch(media_type) or (media_type == _FORM and "origin" not in headers):
        return
    raise UnsupportedMediaType(
        f"Content-Type {named[:100]!r} is not supported: send application/json.",
        code="unsupported_media_type",
        headers={"Accept": "application/json"},
    )


def _check_transfer_coding(headers: Headers) -> None:
    """Chunks are the server's matter; anything else would still be in the body (RFC 9112, section 6.1)."""
    codings = [coding.strip().lower() for coding in ",".join(headers.getlist("transfer-encoding")).split(",")]
    unknown = [coding for coding in codings if coding not in ("", "chunked", IDENTITY)]
    if unknown:
        raise UnsupportedTransferCoding(f"Transfer-Encoding {unknown[0][:100]!r} is not supported: send chunked, or a Content-Length.")


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    ahead = body_sent_ahead(request.scope)
    if ahead is not None:
        if len(ahead) > max_bytes:
            raise _too_large(max_bytes)
        return ahead
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than the {max_bytes} bytes that this server takes.")
