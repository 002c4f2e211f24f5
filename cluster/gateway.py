"""The ingress deployment: the HTTP application over Serve handles."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI
from ray import serve

from cluster.grammar.check_pool import GrammarCheckPool
from cluster.models.grammar_gate import GrammarGate
from cluster.models.model_registry import ModelRegistry
from cluster.serve.serve_backend import ServeBackend
from cluster.settings.gateway_config import GatewayConfig
from cluster.settings.latency_targets import LatencyTarget
from cluster.settings.structured_output import StructuredOutputConfig
from cluster.telemetry.access_log import log_access
from cluster.telemetry.gateway_metrics import GatewayMetrics
from cluster.telemetry.request_record import RequestRecorder
from cluster.web.body_ahead import BodyTaken
from cluster.web.http_app import create_app
from replicas.engine_config import Role
from replicas.process.heap import freeze_heap
from replicas.process.logs import start_logging
from replicas.serve.handles import over_grpc
from replicas.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Above every queue limit, so that Serve never queues: the router decides which requests wait, and rejects the others with 429.
MAX_ONGOING_REQUESTS = 1_000_000


def load_tokenizer(source: str) -> Tokenizer:
    """Calls `Tokenizer.load`, which imports transformers, and excludes the resulting objects from garbage collection. Blocks the process
    for some tenths of a second, once per model."""
    tokenizer = Tokenizer.load(source)
    freeze_heap()
    return tokenizer


@serve.deployment(
    max_ongoing_requests=MAX_ONGOING_REQUESTS,
    health_check_period_s=2.0,
    logging_config={"enable_access_log": False},  # the gateway writes its own
)
@serve.ingress()
class Gateway:
    """The gateway. It has no state beyond its open connections, so any number of gateways behaves like one."""

    def __init__(
        self,
        config: GatewayConfig,
        router: Any,
        replicas: dict[str, dict[Role, Any]],
        targets: dict[str, tuple[LatencyTarget, ...]],
        structured_output: dict[str, StructuredOutputConfig],
        log_level: str,
    ) -> None:
        """`replicas`: model -> role of the pool -> handle of its deployment; `targets`: model -> latency targets;
        `structured_output`: model -> its rules for grammars."""
        start_logging(log_level)
        for caution in config.priorities.cautions:
            logger.info("%s", caution)
        self._config = config
        pools = {name: {role: over_grpc(handle) for role, handle in handles.items()} for name, handles in replicas.items()}
        self._backend = ServeBackend(over_grpc(router), pools)
        self._grammars = GrammarCheckPool()
        gates = {name: GrammarGate(rules, self._grammars) for name, rules in structured_output.items()}
        self._models = ModelRegistry(tuple(replicas), self._backend, targets=targets, grammars=gates, load_tokenizer=load_tokenizer)

    def __serve_build_asgi_app__(self) -> FastAPI:
        metrics = GatewayMetrics()
        app = create_app(
            self._backend,
            self._config,
            self._models,
            lambda: RequestRecorder(log_access, metrics),
            grammars=self._grammars,
            sends_request_id=False,
        )
        app.add_middleware(BodyTaken)  # the outermost
        return app
