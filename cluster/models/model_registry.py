"""The models behind this gateway, each known as soon as one of its replicas has answered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context

from cluster.backend import Backend
from cluster.failures import ModelNotFound, ReplicaGone, Unavailable
from cluster.models.grammar_gate import GrammarGate
from cluster.models.served_model import ServedModel
from cluster.settings.latency_targets import LatencyTarget
from replicas.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class ModelRegistry:
    """Owns the served models. A model's description and tokenizer are fetched once, by whoever asks first."""

    def __init__(
        self,
        names: Sequence[str],
        backend: Backend,
        *,
        targets: Mapping[str, Sequence[LatencyTarget]] | None = None,
        grammars: Mapping[str, GrammarGate] | None = None,
        load_tokenizer: Callable[[str], Tokenizer] = Tokenizer.load,
        wait_s: float = 10.0,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """`targets` has those of each model that has some, `grammars` the gates of models that take grammars.
        `wait_s`: how long a request waits for a model that is still loading."""
        self._names = tuple(names)
        self._backend = backend
        self._targets = targets or {}
        self._grammars = grammars or {}
        self._load_tokenizer = load_tokenizer
        self._wait_s = wait_s
        self._now_s = now_s
        self._models: dict[str, ServedModel] = {}
        self._loading: dict[str, asyncio.Task[ServedModel]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    def loaded(self) -> list[ServedModel]:
        """Models that can serve now, in the configuration's order."""
        return [self._models[name] for name in self._names if name in self._models]

    def begin_loading(self) -> None:
        """Starts fetching every model that is not known yet; does not wait."""
        for name in self._names:
            self._begin(name)

    async def get(self, name: str) -> ServedModel:
        """Raises ModelNotFound, or Unavailable when no replica of it answers in time."""
        if name in self._models:
            return self._models[name]
        if name not in self._names:
            raise ModelNotFound(name, self._names)
        task = self._begin(name)
        try:
            async with asyncio.timeout(self._wait_s):
                return await asyncio.shield(task)
        except (TimeoutError, ReplicaGone) as error:
            raise Unavailable(f"The model {name!r} is still loading.", retry_after_s=5.0) from error

    async def close(self) -> None:
        for task in self._loading.values():
            task.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)

    def _begin(self, name: str) -> asyncio.Task[ServedModel]:
        """In a context of its own: Serve would end the load together with the request that happened to start it."""
        task = self._loading.get(name)
        if task is None or (task.done() and name not in self._models):
            task = self._loading[name] = asyncio.create_task(self._load(name), name=f"load-{name}", context=Context())
            task.add_done_callback(lambda done: _log_failure(name, done))
        return task

    async def _load(self, name: str) -> ServedModel:
        description = await self._backend.describe(name)
        tokenizer = await asyncio.to_thread(self._load_tokenizer, description.tokenizer_source)
        model = self._models[name] = ServedModel(
            name, description, tokenizer, int(self._now_s()), self._targets.get(name, ()), self._grammars.get(name)
        )
        logger.info("model %s: %s", name, description)
        return model


def _log_failure(name: str, task: asyncio.Task[ServedModel]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.warning("model %s could not be described: %s", name, task.exception())
