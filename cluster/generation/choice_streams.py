"""Runs every choice of one HTTP request and merges their deltas into one stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from types import TracebackType

from cluster.backend import Backend
from cluster.generation.choice_delta import ChoiceDelta
from cluster.generation.choice_run import ChoiceRun, Surroundings
from cluster.generation.decisions import Decisions
from cluster.generation.pair_stream import PrefillBooking
from cluster.generation.prepared_generation import PreparedGeneration
from cluster.generation.prompt_scores import PromptScores
from cluster.generation.request_events import ChoiceFinished, Decided, FirstToken, GenerationEnded, RequestEvent
from cluster.generation.usage import Usage
from cluster.models.served_model import ServedModel
from cluster.settings.failover import FailoverPolicy
from replicas.request import FinishReason, GenerationRequest
from router.snapshot import Decision

_QUEUE_SIZE = 256  # deltas that a slow reader may be behind before the replicas' streams wait


class ChoiceStreams:
    """Owns the tasks of the choices, and counts the deltas that its reader has taken.

    Use it as an async context manager and iterate once. Leaving the context cancels choices that still run, on every replica.
    Iterating raises Overloaded, Unavailable, GenerationFailed, or RequestRejected.
    """

    def __init__(
        self,
        prepared: PreparedGeneration,
        model: ServedModel,
        backend: Backend,
        policy: FailoverPolicy,
        emit: Callable[[RequestEvent], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`emit` receives events, in the event loop."""
        self._prepared = prepared
        self._backend = backend
        self._decisions = Decisions(backend, model, policy, clock, sleep)
        self._emit = emit
        self._clock = clock
        self._queue: asyncio.Queue[ChoiceDelta | Exception] = asyncio.Queue(_QUEUE_SIZE)
        self._around = Surroundings(
            model=model,
            backend=backend,
            decisions=self._decisions,
            policy=policy,
            emit=emit,
            put=self._queue.put,
            clock=clock,
            sleep=sleep,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._num_output_tokens = 0
        self._num_tokens = [0] * prepared.num_choices  # of each choice
        self._first_token_s: dict[int, float] = {}  # choice -> when its first tokens were taken
        self._num_cached = [0] * len(prepared.requests)  # by prompt: the most tokens that a choice found cached
        self._num_predicted = [0, 0]  # accepted, rejected

    @property
    def usage(self) -> Usage:
        """Tokens that the reader has taken so far."""
        return Usage(
            num_prompt_tokens=self._prepared.num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_cached_tokens=sum(self._num_cached),
            num_accepted_predicted=self._num_predicted[0],
            num_rejected_predicted=self._num_predicted[1],
        )

    async def __aenter__(self) -> ChoiceStreams:
        if not self._prepared.is_prompt_only:
            self._tasks = [
                asyncio.create_task(self._run_prompt(request, position), name=request.request_id)
                for position, request in enumerate(self._prepared.requests)
            ]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:  # also when another cancel strikes meanwhile
            self._emit(GenerationEnded(at_s=self._clock(), usage=self.usage))

    async def __aiter__(self) -> AsyncIterator[ChoiceDelta]:
        num_choices = self._prepared.num_choices
        if self._prepared.is_prompt_only:
            for index in range(num_choices):
                yield ChoiceDelta(index=index, finish_reason=FinishReason.LENGTH)
            return
        num_open = num_choices
        while num_open:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            self._count(item)
            num_open -= item.finish_reason is not None
            yield item

    def _count(self, delta: ChoiceDelta) -> None:
        if delta.token_ids and delta.index not in self._first_token_s:
            self._first_token_s[delta.index] = self._clock()
            if not self._num_output_tokens:
                self._emit(FirstToken(at_s=self._first_token_s[delta.index]))
        self._num_output_tokens += len(delta.token_ids)
        self._num_tokens[delta.index] += len(delta.token_ids)
        self._num_predicted[0] += delta.num_accepted_predicted
        self._num_predicted[1] += delta.num_rejected_predicted
        if delta.num_cached_tokens:
            position = delta.index // self._prepared.params.n
            self._num_cached[position] = max(self._num_cached[position], delta.num_cached_tokens)
        if delta.finish_reason is not None:
            self._emit(
                ChoiceFinished(
                    at_s=self._clock(),
                    index=delta.index,
                    reason=delta.finish_reason,
                    num_tokens=self._num_tokens[delta.index],
                    first_token_s=self._first_token_s.get(delta.index),
                )
            )

    async def _run_prompt(self, request: GenerationRequest, position: int) -> None:
        """Runs one prompt: one decision, then all its choices. Passes any failure to the reader as an item of the queue."""
        params = self._prepared.params
        scores = None if params.prompt_logprobs is None else PromptScores(is_all=params.max_tokens == 0)
        runs: list[ChoiceRun] = []
        try:
            decision = await self._decisions.first(request, num_choices=params.n)
            self._emit(Decided(at_s=self._clock(), predicted_ttft_s=decision.predicted_ttft_s))
            booking = PrefillBooking(self._backend, decision, params.n)
            async with asyncio.TaskGroup() as group:
                for choice in range(params.n):
                    index = position * params.n + choice
                    run = ChoiceRun(
                        replace(request, choice=choice, params=params.for_choice(choice)),
                        index,
                        self._around,
                        scores if choice == 0 else None,
                    )
                    runs.append(run)
                    if choice == 0 or scores is None:
                        group.create_task(run.run(decision, booking))
                    else:
                        group.create_task(self._run_scored(run, index, scores, decision, booking))
        except* Exception as errors:  # noqa: BLE001 - passed on: the reader raises it
            await self._queue.put(_first(errors))
        finally:
            self._backend.release(request.request_id, sum(run.num_tokens for run in runs))

    async def _run_scored(self, run: ChoiceRun, index: int, scores: PromptScores, decision: Decision, booking: PrefillBooking) -> None:
        """Runs a choice after the prompt's first choice has computed the log-probabilities for both."""
        await self._queue.put(await scores.wait_delta(index))
        if not scores.is_all:
            await run.run(decision, booking)


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    """The first error inside nested groups: the answer can report only one."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
