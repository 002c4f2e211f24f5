"""Reads a request's body without trusting its size."""

from __future__ import annotations

from starlette.requests import Request

from cluster.failures import BodyTooLarge
from cluster.web.body_ahead import body_sent_ahead


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLarge as soon as its length, told or counted, exceeds `max_bytes`."""
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
