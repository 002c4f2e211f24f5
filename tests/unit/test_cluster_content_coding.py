"""Compressed bodies: taken in any form that clients send, cut at the limit, refused by name otherwise."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest

from cluster.failures import BadRequest, BodyTooLarge, UnsupportedMediaType
from cluster.web.content_coding import coding_of, decoded

TEXT = b'{"a": "' + b"word " * 100 + b'"}'


def raw_deflate(body: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(body) + stream.flush()


@pytest.mark.parametrize(
    ("header", "coding"),
    [("", "identity"), ("identity", "identity"), ("gzip", "gzip"), ("GZip", "gzip"), (" x-gzip ", "gzip"), ("deflate", "deflate")],
)
def test_coding_is_known_by_its_names(header: str, coding: str) -> None:
    assert coding_of(header) == coding


@pytest.mark.parametrize("header", ["br", "zstd", "compress", "gzip, gzip", "gzip;q=1", "aes128gcm"])
def test_coding_that_is_not_read_is_named_with_those_that_are(header: str) -> None:
    with pytest.raises(UnsupportedMediaType, match="Content-Encoding") as error:
        coding_of(header)
    assert header in str(error.value)
    assert error.value.headers == {"Accept-Encoding": "gzip, deflate, identity"}


@pytest.mark.parametrize(
    ("body", "coding"),
    [
        (gzip.compress(TEXT), "gzip"),
        (gzip.compress(TEXT[:10]) + gzip.compress(TEXT[10:]), "gzip"),
        (gzip.compress(b"") + gzip.compress(TEXT), "gzip"),
        (zlib.compress(TEXT), "deflate"),
        (zlib.compress(TEXT, 0), "deflate"),
        (raw_deflate(TEXT), "deflate"),
    ],
    ids=["gzip", "two members", "empty member", "zlib", "stored", "raw"],
)
def test_body_is_decoded_up_to_the_limit_and_not_beyond(body: bytes, coding: str) -> None:
    assert decoded(body, coding, len(TEXT)) == TEXT
    with pytest.raises(BodyTooLarge):
        decoded(body, coding, len(TEXT) - 1)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_bomb_is_cut_before_it_fills_the_memory(coding: str) -> None:
    """A thousand times its size: only what the limit allows is ever made of it."""
    body = (gzip.compress if coding == "gzip" else zlib.compress)(bytes(100 * 2**20))
    assert len(body) < 2**20 // 8
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge):
            decoded(body, coding, 2**20)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("damage", ["none of it", "cut off", "followed", "flipped"])
def test_body_that_is_damaged_is_refused(coding: str, damage: str) -> None:
    body = (gzip.compress if coding == "gzip" else zlib.compress)(TEXT)
    damaged = {
        "none of it": TEXT,
        "cut off": body[:-5],
        "followed": body + b"more",
        "flipped": body[:-6] + bytes([body[-6] ^ 255]) + body[-5:],
    }[damage]
    with pytest.raises(BadRequest, match=f"not valid {coding}") as error:
        decoded(damaged, coding, 10**6)
    assert error.value.code == "invalid_content_encoding"


def test_body_of_countless_empty_streams_is_refused_early() -> None:
    assert decoded(gzip.compress(b"") * 999 + gzip.compress(b"{}"), "gzip", 2**22) == b"{}"
    with pytest.raises(BadRequest, match="more than 1000 gzip streams"):
        decoded(gzip.compress(b"") * 200_000, "gzip", 2**22)
