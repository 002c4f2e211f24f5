"""Everything that is not a generation: health, models, tokenizers, and the router's own view."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cluster.backend import Backend
from cluster.failures import DecisionNotFound, RouterGone
from cluster.models.model_registry import ModelRegistry
from cluster.protocols import tokenization
from cluster.protocols.model_cards import model_card, model_list
from cluster.protocols.wire import parse_json_object
from cluster.web.request_body import read_body
from cluster.web.request_scope import Endpoint, state_of
from router.explanation import explanation

VERSION = "0.1.0"


class UtilityRoutes:
    """Endpoints over one backend, without state of their own."""

    def __init__(self, backend: Backend, models: ModelRegistry) -> None:
        self._backend = backend
        self._models = models

    def routes(self) -> tuple[tuple[str, str, Endpoint], ...]:
        """Method, path and endpoint of each."""
        return (
            ("GET", "/v1/models", self.list_models),
            ("GET", "/v1/models/{name:path}", self.get_model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/health", self.health),
            ("GET", "/version", self.version),
            ("GET", "/debug/router", self.debug_router),
            ("GET", "/debug/router/explain/{request_id}", self.explain),
        )

    async def list_models(self, request: Request) -> Response:
        self._models.begin_loading()
        return JSONResponse(model_list(self._models.loaded()))

    async def get_model(self, request: Request) -> Response:
        return JSONResponse(model_card(await self._models.get(request.path_params["name"])))

    async def tokenize(self, request: Request) -> Response:
        body = tokenization.parse_tokenize_request(await _fields(request), state_of(request).principal.limits)
        model = await self._models.get(body.model)
        return JSONResponse(await tokenization.tokenize(body, model))

    async def detokenize(self, request: Request) -> Response:
        body = tokenization.parse_detokenize_request(await _fields(request))
        model = await self._models.get(body.model)
        return JSONResponse(await tokenization.detokenize(body, model))

    async def health(self, request: Request) -> Response:
        """200 while every model can serve; what a load balancer should ask.

        Each model is in one list: `models` can serve, `loading` have not answered yet, `unavailable` have no replica left in the router's
        view."""
        self._models.begin_loading()
        loaded = [model.name for model in self._models.loaded()]
        loading = [name for name in self._models.names if name not in loaded]
        try:
            num_serving = await self._backend.num_serving()
        except RouterGone as error:
            body = {"status": "unavailable", "reason": f"the router: {error}", "models": [], "loading": loading, "unavailable": loaded}
            return JSONResponse(body, status_code=503)
        serving = [name for name in loaded if num_serving.get(name)]
        unavailable = [name for name in loaded if name not in serving]
        status = "unavailable" if unavailable else "loading" if loading else "ok"
        body = {"status": status, "models": serving, "loading": loading, "unavailable": unavailable}
        return JSONResponse(body, status_code=200 if status == "ok" else 503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def debug_router(self, request: Request) -> Response:
        return JSONResponse(await self._backend.describe_router())

    async def explain(self, request: Request) -> Response:
        """Why a request went where it went: the routing answers to it, and to each of its prompts and resends."""
        request_id = request.path_params["request_id"]
        answers = await self._backend.explain(request_id)
        if not answers:
            raise DecisionNotFound(request_id)
        return JSONResponse({"request_id": request_id, "answers": [explanation(answer) for answer in answers]})


async def _fields(request: Request) -> dict[str, object]:
    return parse_json_object(await read_body(request, state_of(request).principal.limits.max_body_bytes))
