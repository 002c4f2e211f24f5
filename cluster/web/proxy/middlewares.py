"""Everything that Manta puts before Serve's own proxy.

Serve's proxy calls `middlewares` when RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it, as `make serve` does.
"""

from __future__ import annotations

import uvicorn.config
from starlette.middleware import Middleware

from cluster.web.body_ahead import BodyAhead
from cluster.web.proxy.answer_guard import AnswerGuard
from cluster.web.proxy.header_guard import HeaderGuard
from replicas.process.heap import freeze_heap

_PROTOCOL = "cluster.web.proxy.http_protocol:HttpProtocol"


def middlewares() -> list[Middleware]:
    """For Serve's proxy, which asks once, before it starts its server. The last one is the outermost."""
    freeze_heap()
    uvicorn.config.HTTP_PROTOCOLS["auto"] = _PROTOCOL  # Serve leaves the protocol to uvicorn, and offers no other way to name it
    return [Middleware(BodyAhead), Middleware(HeaderGuard), Middleware(AnswerGuard)]
