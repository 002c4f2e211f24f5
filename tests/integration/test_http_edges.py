"""What only Serve's own proxy shows: raw connections, its headers, and messages over the limits of its transport."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
from typing import Any

import httpx
import pytest

from tests.integration.conftest import MODEL
from tests.integration.deployed import Deployed, is_idle
from tests.unit.openai_schemas import check_error, check_schema

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

GRPC_DEFAULT_BYTES = 4 * 2**20
JAVA = {
    "Connection": "Upgrade, HTTP2-Settings",
    "Upgrade": "h2c",
    "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    "User-Agent": "Java-http-client/21",
}


@pytest.fixture
async def http(deployed: Deployed) -> Any:
    await deployed.wait_until(lambda model: len(model["replicas"]) == 2, timeout_s=60)
    async with httpx.AsyncClient(base_url=deployed.url, timeout=120) as made:
        yield made


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 3, "temperature": 0, **fields}


async def raw_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """The next answer of a connection, whose length is told or chunked."""
    async with asyncio.timeout(60):
        status_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        if "content-length" in headers:
            return int(status_line.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
        return int(status_line.split()[1]), headers, body


async def test_client_that_offers_http2_with_every_request_is_served_on_one_connection(http: httpx.AsyncClient, deployed: Deployed) -> None:
    """As java.net.http.HttpClient does until a server takes the offer."""
    expected = (await http.post("/v1/completions", json=completion())).json()["choices"][0]["text"]
    reader, writer = await asyncio.open_connection("127.0.0.1", deployed.port)
    for fields in ({}, {"stream": True}, {"n": 0}, {}):
        body = json.dumps(completion(**fields)).encode()
        headers = {"Host": "127.0.0.1", **JAVA, "Content-Type": "application/json", "Content-Length": str(len(body))}
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode() + b"\r\n"
        )
        await writer.drain()
        writer.write(body)
        status, _, answer = await raw_answer(reader)
        if fields == {"n": 0}:
            assert status == 400
            check_schema("ErrorResponse", json.loads(answer))
        elif fields:
            assert answer.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(answer)["choices"][0]["text"] == expected
    writer.close()


async def test_websocket_is_refused_in_the_shape_of_the_api(http: httpx.AsyncClient, deployed: Deployed) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", deployed.port)
    handshake = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    writer.write(f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{handshake}\r\n\r\n".encode())
    status, headers, answer = await raw_answer(reader)
    assert status == 403
    check_schema("ErrorResponse", json.loads(answer))
    assert headers["x-request-id"]
    writer.close()


async def test_what_is_no_request_is_a_400_in_the_shape_of_the_api(http: httpx.AsyncClient, deployed: Deployed) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", deployed.port)
    writer.write(b"what\r\n\r\n")
    status, _, answer = await raw_answer(reader)
    assert status == 400
    check_schema("ErrorResponse", json.loads(answer))
    writer.close()


async def test_timeout_of_serves_own_has_no_effect(http: httpx.AsyncClient) -> None:
    headers = {"x-request-timeout-seconds": "0.001"}
    whole = await http.post("/v1/completions", json=completion(max_tokens=60, ignore_eos=True), headers=headers)
    assert (whole.status_code, whole.json()["usage"]["completion_tokens"]) == (200, 60)
    stream = await http.post("/v1/completions", json=completion(max_tokens=60, stream=True), headers=headers)
    assert stream.text.endswith("data: [DONE]\n\n")


async def test_client_that_goes_is_noticed_whatever_it_asked_of_serve(http: httpx.AsyncClient, deployed: Deployed) -> None:
    body = completion(max_tokens=3000, ignore_eos=True, stream=True)
    async with http.stream("POST", "/v1/completions", json=body, headers={"x-request-disconnect-disabled": "?1"}) as answer:
        await anext(answer.aiter_bytes())
    await deployed.wait_until(is_idle, timeout_s=20)


async def test_header_that_is_not_utf8_is_refused_with_a_request_id(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json=completion(), headers=[(b"x-tenant", b"\xff")])
    assert check_error(response, 400, None)["code"] == "invalid_header"
    assert response.headers["x-request-id"]


async def test_request_id_is_in_every_answer_once(http: httpx.AsyncClient) -> None:
    given = await http.post("/v1/completions", json=completion(), headers={"x-request-id": "mine"})
    made = await http.post("/v1/completions", json=completion(n=0))
    assert given.headers.get_list("x-request-id") == ["mine"]
    assert len(made.headers.get_list("x-request-id")) == 1
    unsafe = await http.post("/v1/completions", json=completion(), headers={"x-request-id": "<script>"})
    (replaced,) = unsafe.headers.get_list("x-request-id")
    assert replaced.startswith("req-")


@pytest.mark.parametrize("num_bytes", [100, 300_000])
async def test_compressed_body_is_read_whether_it_goes_ahead_or_not(http: httpx.AsyncClient, num_bytes: int) -> None:
    """The larger one does not shrink, and is over what goes ahead."""
    body = gzip.compress(json.dumps(completion()).encode() + b" " * num_bytes, compresslevel=0)
    response = await http.post("/v1/completions", content=body, headers={"Content-Encoding": "gzip"})
    assert response.status_code == 200, response.text


async def test_answer_over_the_limit_of_grpc_is_whole(http: httpx.AsyncClient) -> None:
    prompts = ["word " * 1100] * 48
    response = await http.post("/v1/completions", json=completion(prompt=prompts, max_tokens=0, echo=True, n=16))
    assert response.status_code == 200, response.text[:500]
    assert len(response.content) > GRPC_DEFAULT_BYTES
    assert [choice["text"] for choice in response.json()["choices"]] == [prompts[0]] * 48 * 16


async def test_prompt_logprobs_over_the_limit_of_grpc_are_whole(http: httpx.AsyncClient) -> None:
    """Beside the answer, the message from the replica grows with the prompt."""
    response = await http.post("/v1/completions", json=completion(prompt=list(range(100, 4000)), max_tokens=1, prompt_logprobs=20))
    assert response.status_code == 200, response.text[:500]
    assert len(response.content) > GRPC_DEFAULT_BYTES
    assert len(response.json()["choices"][0]["prompt_logprobs"]) == 3900


async def test_paths_of_serve_itself_answer_as_ever(http: httpx.AsyncClient) -> None:
    assert (await http.get("/-/healthz")).text == "success"


async def test_clients_of_a_gateway_that_dies_are_told_so_in_the_shape_of_the_api(http: httpx.AsyncClient, deployed: Deployed) -> None:
    begun = asyncio.Event()

    async def streamed() -> str:
        text = ""
        async with http.stream("POST", "/v1/completions", json=completion(max_tokens=1500, ignore_eos=True, stream=True)) as answer:
            async for part in answer.aiter_text():
                text += part
                begun.set()
        return text

    async def whole() -> httpx.Response:
        return await http.post("/v1/completions", json=completion(max_tokens=1500, ignore_eos=True))

    streams = [asyncio.create_task(streamed()) for _ in range(12)]
    answers = [asyncio.create_task(whole()) for _ in range(12)]
    await begun.wait()
    os.kill(deployed.pid_of("gateway"), signal.SIGKILL)
    endings = [text.removesuffix("\n\n").rpartition("\n\n")[2].removeprefix("data: ") for text in await asyncio.gather(*streams)]
    errors = [json.loads(ending) for ending in endings if ending != "[DONE]"]
    failed = [response.json() for response in await asyncio.gather(*answers) if response.status_code != 200]
    assert 0 < len(errors) < 12  # the other gateway's end well
    assert 0 < len(failed) < 12
    for error in (*errors, *failed):
        check_schema("ErrorResponse", error)
