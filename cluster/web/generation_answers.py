"""Answers a prepared generation, whole or as a stream of events, in whatever protocol it came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response

from cluster.failures import answer_for
from cluster.generation.backend import Backend
from cluster.generation.choice_delta import ChoiceDelta
from cluster.generation.choice_streams import ChoiceStreams
from cluster.generation.prepared_generation import PreparedGeneration
from cluster.generation.request_events import Failed, Prepared
from cluster.generation.served_model import ServedModel
from cluster.generation.usage import Usage
from cluster.protocols.openai.responses import usage_body
from cluster.settings.failover import FailoverPolicy
from cluster.web.request_scope import RequestState
from cluster.web.server_sent_events import DONE, EventStream, event


class Chunks(Protocol):
    """Writes a stream: what opens it, what each delta adds, and the usage at its end."""

    def start(self) -> list[dict[str, Any]]: ...
    def delta(self, delta: ChoiceDelta) -> list[dict[str, Any]]: ...
    def usage(self, usage: Mapping[str, Any]) -> dict[str, Any]: ...


class Whole(Protocol):
    """Collects deltas into one body."""

    def add(self, delta: ChoiceDelta) -> None: ...
    def body(self, usage: Mapping[str, Any]) -> dict[str, Any]: ...


class GenerationAnswers:
    """Runs generations on a backend. A generation ends, on every replica, before its answer does."""

    def __init__(self, backend: Backend, policy: FailoverPolicy) -> None:
        self._backend = backend
        self._policy = policy

    async def respond(
        self, prepared: PreparedGeneration, model: ServedModel, chunks: Chunks, whole: Whole, state: RequestState
    ) -> Response:
        """Returns a stream only once its first token is there, so that failing before it keeps its own status.

        Raises what `ChoiceStreams` raises.
        """
        state.emit(Prepared(at_s=state.clock(), response_id=prepared.response_id, num_prompt_tokens=prepared.num_prompt_tokens))
        streams = ChoiceStreams(prepared, model, self._backend, self._policy, state.emit, state.clock)
        if prepared.stream:
            events = self._events(prepared, streams, chunks, state)
            return EventStream(await anext(events), events)
        async with streams:
            async for delta in streams:
                whole.add(delta)
        if prepared.params.prompt_logprobs is None:
            return JSONResponse(whole.body(_usage(streams.usage)))
        return await asyncio.to_thread(lambda: JSONResponse(whole.body(_usage(streams.usage))))  # long as the prompt is

    async def _events(
        self, prepared: PreparedGeneration, streams: ChoiceStreams, chunks: Chunks, state: RequestState
    ) -> AsyncGenerator[bytes, None]:
        has_begun = False
        async with streams:
            try:
                async for delta in streams:
                    is_long = delta.prompt_logprobs is not None
                    added = await asyncio.to_thread(chunks.delta, delta) if is_long else chunks.delta(delta)
                    new = added if has_begun else [*chunks.start(), *added]
                    if new:
                        yield _join(new)
                        has_begun = True
            except Exception as error:  # the status is out: all that is left is an event
                if not has_begun:
                    raise
                answer = answer_for(error, state.request_id)
                state.emit(Failed(at_s=state.clock(), code=answer.code or answer.type))
                yield event(answer.body())
                return
        last = [] if has_begun else chunks.start()
        if prepared.include_usage:
            last.append(chunks.usage(_usage(streams.usage)))
        yield _join(last) + DONE


def _join(chunks: list[dict[str, Any]]) -> bytes:
    return b"".join(map(event, chunks))


def _usage(usage: Usage) -> dict[str, Any]:
    return usage_body(usage.num_prompt_tokens, usage.num_output_tokens, usage.num_cached_tokens)
