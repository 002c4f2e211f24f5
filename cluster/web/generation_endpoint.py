"""Answers the requests of one dialect, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cluster.backend import Backend
from cluster.failures import answer_for
from cluster.generation.choice_streams import ChoiceStreams
from cluster.generation.notice_headers import notice_headers
from cluster.generation.request_context import RequestContext
from cluster.generation.request_events import Failed, ModelFound, Parsed, Prepared
from cluster.models.model_registry import ModelRegistry
from cluster.models.served_model import ServedModel
from cluster.protocols.dialect import AnswerWriter, Dialect, ParsedCall, StreamWriter
from cluster.settings.gateway_config import GatewayConfig
from cluster.web.disconnect import run_until_disconnect
from cluster.web.event_stream import EventStream
from cluster.web.request_body import read_body
from cluster.web.request_headers import context_of
from cluster.web.request_scope import RequestFacts, state_of


class GenerationEndpoint:
    """One dialect over one backend. A generation ends, on every replica, before its answer does."""

    def __init__(
        self, dialect: Dialect, backend: Backend, models: ModelRegistry, config: GatewayConfig, now_s: Callable[[], float] = time.time
    ) -> None:
        """`now_s` gives Unix time."""
        self._dialect = dialect
        self._backend = backend
        self._models = models
        self._config = config
        self._now_s = now_s

    async def answer(self, request: Request) -> Response:
        """Raises what `failures.answer_for` has an answer for, and ClientDisconnected."""
        state = state_of(request)
        limits = state.principal.limits
        call = self._dialect.parse(await read_body(request, limits.max_body_bytes), limits)
        state.emit(Parsed(at_s=state.clock(), user=call.user, prompt=call.prompt if self._config.log_prompts else None))
        model = await self._models.get(call.model)
        state.emit(ModelFound(at_s=state.clock(), model=model.name))
        context = context_of(request.headers, state.principal, priority_header=self._config.priorities.header, arrival_s=self._now_s())
        return await run_until_disconnect(request.receive, self._generate(call, model, context, state))

    async def _generate(self, call: ParsedCall, model: ServedModel, context: RequestContext, state: RequestFacts) -> Response:
        """Returns a stream only once its first token is there, so that failing before it keeps its own status."""
        prepared = await call.prepare(model, context)
        generation = prepared.generation
        state.emit(
            Prepared(
                at_s=state.clock(),
                response_id=generation.response_id,
                num_prompt_tokens=generation.num_prompt_tokens,
                num_choices=generation.num_choices,
                target=generation.target,
                grammar=None if generation.params.grammar is None else generation.params.grammar.kind,
                dropped_keywords=generation.dropped_keywords,
            )
        )
        headers = notice_headers(generation)
        streams = ChoiceStreams(generation, model, self._backend, self._config.failover, state.emit, state.clock)
        if generation.stream:
            events = self._events(streams, prepared.stream_writer(), state)
            return EventStream(await anext(events), events, headers)
        is_long = generation.params.prompt_logprobs is not None  # as long as the prompt
        return await _whole(streams, prepared.answer_writer(), headers, is_long=is_long)

    async def _events(self, streams: ChoiceStreams, writer: StreamWriter, state: RequestFacts) -> AsyncGenerator[bytes, None]:
        unsent, has_begun = writer.start(), False
        async with streams:
            try:
                async for delta in streams:
                    is_long = delta.prompt_logprobs is not None
                    unsent += await asyncio.to_thread(writer.delta, delta) if is_long else writer.delta(delta)
                    if unsent:
                        yield unsent
                        unsent, has_begun = b"", True
                unsent += writer.end(streams.usage)
            except Exception as error:  # the status is out: all that is left is an event
                if not has_begun:
                    raise
                answer = answer_for(error, state.request_id)
                state.emit(Failed(at_s=state.clock(), code=answer.label))
                yield self._dialect.error_event(answer)
                return
        yield unsent


async def _whole(streams: ChoiceStreams, writer: AnswerWriter, headers: dict[str, str], *, is_long: bool) -> Response:
    async with streams:
        async for delta in streams:
            writer.add(delta)
    if not is_long:
        return JSONResponse(writer.body(streams.usage), headers=headers)
    return await asyncio.to_thread(lambda: JSONResponse(writer.body(streams.usage), headers=headers))
