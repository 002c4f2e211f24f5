"""A real HTTP server in the test's own event loop, for what only real connections show."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from cluster.web.proxy.http_protocol import HttpProtocol


@asynccontextmanager
async def serving(app: ASGIApp, *, websockets: bool = False) -> AsyncIterator[int]:
    """Serves `app` on a free port of the loopback address and yields the port. Serve's proxy has `websockets`."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        ws = "auto" if websockets else "none"
        server = uvicorn.Server(
            uvicorn.Config(app, http=HttpProtocol, log_config=None, lifespan="auto", ws=ws, timeout_graceful_shutdown=1)
        )
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(30):
                while not server.started:
                    await asyncio.sleep(0.005)
            yield port
        finally:
            server.should_exit = True
            await task
