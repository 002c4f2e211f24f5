"""The HTTP application: which endpoint answers which path. Knows no Ray: a Backend does what needs the cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cluster.backend import Backend
from cluster.generation.request_events import RequestObserver
from cluster.grammar.check_pool import GrammarCheckPool
from cluster.models.model_registry import ModelRegistry
from cluster.protocols.dialect import Dialect
from cluster.protocols.dialects import DEFAULT_DIALECT, DIALECTS
from cluster.settings.gateway_config import GatewayConfig
from cluster.web.cors import Cors
from cluster.web.error_answers import error_response, guarded
from cluster.web.generation_endpoint import GenerationEndpoint
from cluster.web.principals import Principals
from cluster.web.request_scope import RequestScope
from cluster.web.utility_routes import VERSION, UtilityRoutes


def create_app(
    backend: Backend,
    config: GatewayConfig,
    models: ModelRegistry,
    observe: Callable[[], RequestObserver],
    *,
    dialects: Sequence[Dialect] = DIALECTS,
    grammars: GrammarCheckPool | None = None,
    sends_request_id: bool = True,
) -> FastAPI:
    """The whole HTTP surface over `backend`: with Serve behind it in production, with an engine in process in tests. `observe`
    makes the observer of one request. `grammars` are the checks that the gates of `models` use, started and ended with the application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        backend.start()
        models.begin_loading()
        if grammars is not None:
            grammars.warm_up()
        yield
        if grammars is not None:
            await grammars.close()
        await models.close()
        await backend.close()

    app = FastAPI(title="Manta", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    for dialect in dialects:
        endpoint = GenerationEndpoint(dialect, backend, models, config)
        app.add_route(dialect.path, guarded(endpoint.answer, dialect), methods=["POST"])
    for method, path, utility in UtilityRoutes(backend, models).routes():
        app.add_route(path, guarded(utility, DEFAULT_DIALECT), methods=[method])
    app.add_exception_handler(HTTPException, _answer_unrouted)
    app.add_middleware(RequestScope, principals=Principals(config), observe=observe, sends_request_id=sends_request_id)
    if config.cors.origins:
        app.add_middleware(Cors, rules=config.cors)
    return app


def _answer_unrouted(request: Request, error: Exception) -> Response:
    return error_response(request, error, DEFAULT_DIALECT)
