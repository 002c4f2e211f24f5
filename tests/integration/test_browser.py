"""A page of another origin in a real browser: whether it may call the API is the browser's own decision."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from cluster.settings.cors import CorsRules
from cluster.settings.gateway_config import GatewayConfig
from replicas.text.tokenizer import Tokenizer
from tests.unit.http_server import serving
from tests.unit.in_process_cluster import CHAT, MODEL, running_cluster

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="waits for a browser: apt install chromium")

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "one two three"}], "max_tokens": 4, "stream": True}
SCRIPT = """<!doctype html><title>another origin</title><script>
(async () => {
  const found = {};
  try {
    const answer = await fetch(URL_OF_CHAT, {method: "POST", body: JSON.stringify(BODY),
      headers: {"Content-Type": "application/json", "Authorization": "Bearer none"}});
    found.status = answer.status;
    found.id = answer.headers.get("X-Request-Id");
    found.text = await answer.text();
  } catch (error) { found.error = error.name; }
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


class Page:
    """A page that calls the API and tells its own server what came of it."""

    def __init__(self) -> None:
        self.api_port = 0
        self.found: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.app = Starlette(routes=[Route("/", self._show), Route("/found", self._note, methods=["POST"])])

    async def _show(self, request: Request) -> Response:
        url = json.dumps(f"http://127.0.0.1:{self.api_port}{CHAT}")
        return HTMLResponse(SCRIPT.replace("URL_OF_CHAT", url).replace("BODY", json.dumps(BODY)))

    async def _note(self, request: Request) -> Response:
        self.found.set_result(await request.json())
        return Response()


async def visit(url: str, page: Page, profile: Path) -> dict[str, Any]:
    """What the page found in a browser."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-port=0",
        f"--user-data-dir={profile}", url,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            return await page.found
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("is_named", [True, False])
async def test_page_of_another_origin_streams_a_chat_only_if_its_origin_is_named(
    default_tokenizer: Tokenizer, tmp_path: Path, is_named: bool
) -> None:
    page = Page()
    async with serving(page.app) as page_port:
        origin = f"http://localhost:{page_port}"
        config = GatewayConfig(cors=CorsRules(origins=(origin if is_named else "http://localhost:1",)))
        async with running_cluster(default_tokenizer, config=config) as cluster, serving(cluster.app) as page.api_port:
            found = await visit(origin, page, tmp_path)
            await cluster.wait_idle()
    if is_named:
        assert found["status"] == 200
        assert found["id"]
        assert found["text"].endswith("data: [DONE]\n\n")
    else:
        assert found == {"error": "TypeError"}, "the browser refused"
        assert not any(record.num_output_tokens for record in cluster.records), "the preflight was enough"
