"""Bodies that were compressed on the way (RFC 9110, section 8.4)."""

from __future__ import annotations

import zlib

from cluster.failures import BadRequest, BodyTooLarge, UnsupportedMediaType

IDENTITY = "identity"
_CODINGS = ("gzip", "deflate")
_MAX_STREAMS = 1_000
"""Gzip streams in one body. Each copies what follows it, so a body of nothing but empty ones would cost the square of their number."""
_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's names for the three containers


def coding_of(header: str) -> str:
    """The coding that a Content-Encoding header names. Raises UnsupportedMediaType for any that is not read here, and for several."""
    name = header.strip().lower().removeprefix("x-")
    if name in ("", IDENTITY):
        return IDENTITY
    if name not in _CODINGS:
        raise UnsupportedMediaType(
            f"Content-Encoding {header[:100]!r} is not supported: send {', '.join(_CODINGS)} or {IDENTITY}.",
            code="unsupported_content_encoding",
            headers={"Accept-Encoding": ", ".join([*_CODINGS, IDENTITY])},
        )
    return name


def decoded(body: bytes, coding: str, max_bytes: int) -> bytes:
    """The body without its coding. Stops at `max_bytes`, whatever the body claims: raises BodyTooLarge. Raises BadRequest for a body
    that is damaged, cut off or followed by something else."""
    whole = bytearray()
    rest = body
    try:
        for _ in range(_MAX_STREAMS + 1):
            if not rest:
                return bytes(whole)
            part, rest = _inflated(rest, coding, max_bytes - len(whole))
            whole += part
    except zlib.error as error:
        message = f"The request body is not valid {coding}, as its Content-Encoding says: {error}."
        raise BadRequest(message, code="invalid_content_encoding") from error
    raise BadRequest(f"The request body has more than {_MAX_STREAMS} {coding} streams: send one.", code="invalid_content_encoding")


def _inflated(data: bytes, coding: str, max_bytes: int) -> tuple[bytes, bytes]:
    """One stream at the start of `data`, and what follows it: a gzip body may have several."""
    container = _GZIP if coding == "gzip" else _ZLIB if _is_zlib(data) else _RAW
    stream = zlib.decompressobj(container)
    part = stream.decompress(data, max_bytes + 1)
    if len(part) > max_bytes:
        raise BodyTooLarge(f"The request body, decoded, is larger than the {max_bytes} bytes that are left for it.")
    if not stream.eof:
        raise zlib.error("it is cut off")
    if stream.unused_data and coding != "gzip":
        raise zlib.error("it goes on after its end")
    return part, stream.unused_data


def _is_zlib(data: bytes) -> bool:
    """RFC 9110 means zlib by deflate, but many send the bare stream. A zlib header is a multiple of 31 (RFC 1950)."""
    return len(data) > 1 and data[0] & 0x0F == 8 and int.from_bytes(data[:2], "big") % 31 == 0
