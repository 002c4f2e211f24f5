"""Browsers: preflights and permissions, by raw requests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from cluster.settings.config import ConfigError, read_config
from cluster.settings.cors import CorsRules
from cluster.settings.gateway_config import GatewayConfig
from replicas.text.tokenizer import Tokenizer
from tests.unit.in_process_cluster import CHAT, MODEL, TEXT, client_of, running_cluster
from tests.unit.openai_schemas import check_error

PAGE = "http://localhost:3000"
BODY = {"model": MODEL, "prompt": "one", "max_tokens": 1}


async def client_with(tokenizer: Tokenizer, *origins: str) -> AsyncIterator[httpx.AsyncClient]:
    config = GatewayConfig(cors=CorsRules(origins=origins, max_age_s=60))
    async with running_cluster(tokenizer, config=config) as cluster, client_of(cluster) as made:
        yield made


@pytest.fixture
async def named(default_tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async for made in client_with(default_tokenizer, "https://chat.example.com", PAGE):
        yield made


@pytest.fixture
async def open_to_all(default_tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async for made in client_with(default_tokenizer, "*"):
        yield made


def preflight(client: httpx.AsyncClient, origin: str, path: str = CHAT):
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return client.request("OPTIONS", path, headers=headers)


def permissions(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


async def test_preflight_of_a_named_page_is_granted(named: httpx.AsyncClient) -> None:
    response = await preflight(named, PAGE)
    assert (response.status_code, response.content) == (204, b"")
    assert permissions(response) == {
        "access-control-allow-origin": PAGE,
        "access-control-allow-methods": "GET, POST",
        "access-control-allow-headers": "authorization,content-type",
        "access-control-max-age": "60",
        "access-control-expose-headers": "Retry-After, X-Request-Id",
    }
    assert {name.strip() for name in response.headers["vary"].split(",")} == {"Origin", "Access-Control-Request-Headers"}


@pytest.mark.parametrize("origin", ["http://localhost:3001", "https://localhost:3000", "http://localhost", "null", "*", f"{PAGE}.evil.com"])
async def test_preflight_of_another_page_is_403_without_permission(named: httpx.AsyncClient, origin: str) -> None:
    response = await preflight(named, origin)
    assert "gateway.cors.origins" in check_error(response, 403, None)["message"]
    assert permissions(response) == {}
    assert response.headers["vary"] == "Origin"


@pytest.mark.parametrize(
    ("path", "body", "status"), [(TEXT, BODY, 200), (TEXT, {**BODY, "n": 0}, 400), ("/v1/nothing", {}, 404), ("/v1/models", {}, 405)]
)
async def test_answer_may_be_read_by_a_named_page_alone(named: httpx.AsyncClient, path: str, body: dict[str, object], status: int) -> None:
    mine = await named.post(path, json=body, headers={"Origin": PAGE})
    other = await named.post(path, json=body, headers={"Origin": "http://elsewhere"})
    neither = await named.post(path, json=body)
    assert [response.status_code for response in (mine, other, neither)] == [status] * 3
    assert mine.headers["access-control-allow-origin"] == PAGE
    assert permissions(other) == permissions(neither) == {}
    assert [response.headers["vary"] for response in (mine, other, neither)] == ["Origin"] * 3


async def test_stream_may_be_read(named: httpx.AsyncClient) -> None:
    response = await named.post(TEXT, json={**BODY, "stream": True}, headers={"Origin": PAGE})
    assert response.text.endswith("data: [DONE]\n\n")
    assert response.headers["access-control-allow-origin"] == PAGE


async def test_every_page_may_when_all_are_named(open_to_all: httpx.AsyncClient) -> None:
    for response in (await preflight(open_to_all, "http://anywhere"), await open_to_all.get("/v1/models", headers={"Origin": "null"})):
        assert response.is_success
        assert response.headers["access-control-allow-origin"] == "*"


async def test_nothing_is_permitted_unless_configured(client: httpx.AsyncClient) -> None:
    response = await preflight(client, PAGE)
    assert response.status_code == 405
    answer = await client.post(TEXT, json=BODY, headers={"Origin": PAGE})
    assert answer.status_code == 200
    assert permissions(response) == permissions(answer) == {}


async def test_options_without_a_preflight_is_an_unknown_method(named: httpx.AsyncClient) -> None:
    assert (await named.request("OPTIONS", CHAT, headers={"Origin": PAGE})).status_code == 405


@pytest.mark.parametrize(
    "origin", ["localhost:3000", "http://localhost:3000/", "https://Chat.example.com", "null", "", "https://*.example.com", "http://a b"]
)
def test_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match=r"^origins must be like"):
        CorsRules(origins=(origin,))


def test_origins_are_read_from_the_args() -> None:
    args = {"models": [{}], "gateway": {"cors": {"origins": [PAGE, "*"]}}}
    assert read_config(args).gateway.cors == CorsRules(origins=(PAGE, "*"), max_age_s=600)
    with pytest.raises(ConfigError, match=r"gateway\.cors\.origins must be like"):
        read_config({"models": [{}], "gateway": {"cors": {"origins": ["localhost"]}}})
