"""Headers that say what a body is, with the whole gateway behind them."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from typing import Any

import httpx
import pytest

from cluster.settings.gateway_config import GatewayConfig
from cluster.settings.limits import RequestLimits
from replicas.text.tokenizer import Tokenizer
from tests.unit.in_process_cluster import CHAT, MODEL, TEXT, client_of, running_cluster
from tests.unit.openai_schemas import check_error

BODIES = {
    TEXT: {"model": MODEL, "prompt": "one two", "max_tokens": 2},
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/tokenize": {"model": MODEL, "prompt": "one two"},
    "/detokenize": {"model": MODEL, "tokens": [5]},
}


async def post(client: httpx.AsyncClient, path: str, content: bytes | None = None, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await client.post(path, content=json.dumps(BODIES[path]).encode() if content is None else content, headers=named)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "media_type",
    [
        "application/json",
        "application/json; charset=utf-8",
        "Application/JSON",
        "application/vnd.api+json",
        "application/x-www-form-urlencoded",
        "",
    ],
)
async def test_body_of_json_or_of_no_type_is_taken(client: httpx.AsyncClient, path: str, media_type: str) -> None:
    """curl's `-d` calls every body a form."""
    assert (await post(client, path, **({"content_type": media_type} if media_type else {}))).status_code == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "media_type",
    [
        "text/plain",
        "text/json",
        "application/xml",
        "multipart/form-data; boundary=x",
        "application/jsonl",
        "application/octet-stream",
        "json",
    ],
)
async def test_body_of_another_type_is_415_with_the_right_one(client: httpx.AsyncClient, path: str, media_type: str) -> None:
    response = await post(client, path, content_type=media_type)
    error = check_error(response, 415, None)
    assert error["code"] == "unsupported_media_type"
    assert media_type in error["message"]
    assert response.headers["accept"] == "application/json"


async def test_form_of_a_web_page_is_refused(client: httpx.AsyncClient) -> None:
    """The only type of these that a page may send across origins without asking first."""
    response = await post(client, TEXT, content_type="application/x-www-form-urlencoded", origin="http://elsewhere")
    check_error(response, 415, None)


@pytest.mark.parametrize("path", BODIES)
async def test_byte_order_mark_is_passed_over(client: httpx.AsyncClient, path: str) -> None:
    body = json.dumps(BODIES[path]).encode()
    assert (await post(client, path, codecs.BOM_UTF8 + body)).status_code == 200
    for other in (codecs.BOM_UTF8 * 2 + body, json.dumps(BODIES[path]).encode("utf-16")):
        assert check_error(await post(client, path, other), 400, None)["code"] == "invalid_json"
    check_error(await post(client, path, codecs.BOM_UTF8), 400, None)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("coding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)])
async def test_compressed_body_is_read(client: httpx.AsyncClient, path: str, coding: str, compress: Any) -> None:
    plain = await post(client, path)
    answer = await post(client, path, compress(json.dumps(BODIES[path]).encode()), content_encoding=coding)
    assert (answer.status_code, set(answer.json())) == (plain.status_code, set(plain.json()))


async def test_coding_that_is_not_read_is_415_and_named(client: httpx.AsyncClient) -> None:
    response = await post(client, TEXT, content_encoding="br")
    assert "'br'" in check_error(response, 415, None)["message"]
    assert response.headers["accept-encoding"] == "gzip, deflate, identity"


async def test_body_that_is_not_in_its_coding_is_400(client: httpx.AsyncClient) -> None:
    assert check_error(await post(client, TEXT, content_encoding="gzip"), 400, None)["code"] == "invalid_content_encoding"


async def test_limit_is_that_of_the_decoded_body(default_tokenizer: Tokenizer) -> None:
    config = GatewayConfig(limits=RequestLimits(max_body_bytes=300))
    async with running_cluster(default_tokenizer, config=config) as cluster, client_of(cluster) as client:
        for num_spaces, status in ((100, 200), (400, 413)):
            body = gzip.compress(json.dumps(BODIES[TEXT]).encode() + b" " * num_spaces)
            assert len(body) < 300
            assert (await post(client, TEXT, body, content_encoding="gzip")).status_code == status


async def test_transfer_coding_that_is_not_read_is_501(client: httpx.AsyncClient) -> None:
    error = check_error(await post(client, TEXT, transfer_encoding="gzip, chunked"), 501, None)
    assert error["code"] == "unsupported_transfer_encoding"
    assert (await post(client, TEXT, transfer_encoding="chunked")).status_code == 200
