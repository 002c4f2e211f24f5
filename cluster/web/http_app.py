"""The HTTP application: routes and the order of work for each. Knows no Ray: a Backend does what needs the cluster."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cluster.generation.backend import Backend
from cluster.generation.model_registry import ModelRegistry
from cluster.generation.request_context import RequestContext
from cluster.generation.request_events import ModelFound, Parsed, RequestObserver
from cluster.generation.served_model import ServedModel
from cluster.protocols.openai import conversion, tokenization
from cluster.protocols.openai.chat_request import ChatCompletionRequest
from cluster.protocols.openai.completion_request import CompletionRequest
from cluster.protocols.openai.responses import ChatAnswer, ChatChunks, CompletionAnswer, CompletionChunks, model_list
from cluster.protocols.openai.wire import parse_json_object
from cluster.settings.gateway_config import GatewayConfig
from cluster.web.disconnect import run_until_disconnect
from cluster.web.generation_answers import GenerationAnswers
from cluster.web.principals import Principals
from cluster.web.request_body import read_body
from cluster.web.request_headers import context_of
from cluster.web.request_scope import RequestScope, error_response, guarded, state_of
from router.explanation import explanation

VERSION = "0.1.0"


class HttpApi:
    """Endpoints over one backend. Holds no state of a request: that lives in its ChoiceStreams and RequestState."""

    def __init__(self, backend: Backend, models: ModelRegistry, config: GatewayConfig, now_s: Callable[[], float] = time.time) -> None:
        self._backend = backend
        self._models = models
        self._config = config
        self._now_s = now_s
        self._answers = GenerationAnswers(backend, config.failover)

    async def chat_completions(self, request: Request) -> Response:
        fields = await self._read(request)
        body = conversion.parse_chat_request(fields, self._config.limits)
        model = await self._model(request, body.model, body.user, fields.get("messages"))
        return await run_until_disconnect(request.receive, self._chat(request, body, model))

    async def completions(self, request: Request) -> Response:
        fields = await self._read(request)
        body = conversion.parse_completion_request(fields, self._config.limits)
        model = await self._model(request, body.model, body.user, fields.get("prompt"))
        return await run_until_disconnect(request.receive, self._completion(request, body, model))

    async def list_models(self, request: Request) -> Response:
        self._models.begin_loading()
        return JSONResponse(model_list(self._models.loaded()))

    async def get_model(self, request: Request) -> Response:
        return JSONResponse((await self._models.get(request.path_params["name"])).model_card())

    async def tokenize(self, request: Request) -> Response:
        body = tokenization.parse_tokenize_request(await self._read(request), self._config.limits)
        model = await self._models.get(body.model)
        return JSONResponse(await tokenization.tokenize(body, model))

    async def detokenize(self, request: Request) -> Response:
        body = tokenization.parse_detokenize_request(await self._read(request))
        model = await self._models.get(body.model)
        return JSONResponse(await tokenization.detokenize(body, model))

    async def health(self, request: Request) -> Response:
        """200 once every model has a replica that answered; what a load balancer should ask."""
        self._models.begin_loading()
        loaded = [model.name for model in self._models.loaded()]
        waiting = [name for name in self._models.names if name not in loaded]
        status = "loading" if waiting else "ok"
        return JSONResponse({"status": status, "models": loaded, "loading": waiting}, status_code=503 if waiting else 200)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def debug_router(self, request: Request) -> Response:
        return JSONResponse(await self._backend.describe_router())

    async def explain(self, request: Request) -> Response:
        """Why a request went where it went: the routing answers to it, and to each of its prompts and resends."""
        request_id = request.path_params["request_id"]
        answers = await self._backend.explain(request_id)
        if not answers:
            raise HTTPException(
                404,
                f'No decision on {request_id[:200]!r} is kept: ids are those of answers ("chatcmpl-..."), '
                "and only the last ones are known.",
            )
        return JSONResponse({"request_id": request_id, "answers": [explanation(answer) for answer in answers]})

    async def _read(self, request: Request) -> dict[str, object]:
        return parse_json_object(await read_body(request, self._config.limits.max_body_bytes))

    async def _model(self, request: Request, name: str, user: str | None, prompt: object) -> ServedModel:
        state = state_of(request)
        state.emit(Parsed(at_s=state.clock(), user=user, prompt=prompt if self._config.log_prompts else None))
        model = await self._models.get(name)
        state.emit(ModelFound(at_s=state.clock(), model=model.name))
        return model

    def _context(self, request: Request) -> RequestContext:
        return context_of(
            request.headers,
            state_of(request).principal,
            priority_header=self._config.priorities.header,
            arrival_s=self._now_s(),
        )

    async def _chat(self, request: Request, body: ChatCompletionRequest, model: ServedModel) -> Response:
        prepared = await conversion.prepare_chat(body, model, self._context(request))
        chunks, whole = ChatChunks(prepared, model), ChatAnswer(prepared, model, body.metadata)
        return await self._answers.respond(prepared, model, chunks, whole, state_of(request))

    async def _completion(self, request: Request, body: CompletionRequest, model: ServedModel) -> Response:
        prepared = await conversion.prepare_completion(body, model, self._context(request))
        chunks, whole = CompletionChunks(prepared, model), CompletionAnswer(prepared, model)
        return await self._answers.respond(prepared, model, chunks, whole, state_of(request))


def create_app(
    backend: Backend,
    config: GatewayConfig,
    models: ModelRegistry,
    observe: Callable[[], RequestObserver],
    *,
    sends_request_id: bool = True,
) -> FastAPI:
    """The whole HTTP surface over `backend`: with Serve behind it in production, with an engine in process in tests. `observe`
    makes the observer of one request."""
    api = HttpApi(backend, models, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        backend.start()
        models.begin_loading()
        yield
        await models.close()
        await backend.close()

    app = FastAPI(title="Manta", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    for method, path, endpoint in (
        ("POST", "/v1/chat/completions", api.chat_completions),
        ("POST", "/v1/completions", api.completions),
        ("GET", "/v1/models", api.list_models),
        ("GET", "/v1/models/{name:path}", api.get_model),
        ("POST", "/tokenize", api.tokenize),
        ("POST", "/detokenize", api.detokenize),
        ("GET", "/health", api.health),
        ("GET", "/version", api.version),
        ("GET", "/debug/router", api.debug_router),
        ("GET", "/debug/router/explain/{request_id}", api.explain),
    ):
        app.add_route(path, guarded(endpoint), methods=[method])
    app.add_exception_handler(HTTPException, error_response)
    app.add_middleware(RequestScope, principals=Principals(config), observe=observe, sends_request_id=sends_request_id)
    return app
