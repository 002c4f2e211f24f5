"""Runs every choice of one HTTP request on its replica and merges what they say into one stream of text.

A choice runs on one replica, or on a pair (`pair_stream`). A replica that dies is replaced: the choice goes on elsewhere from its
journal, and its reader notices only a pause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

from cluster.failures import GenerationFailed, Overloaded, ReplicaDied, ReplicaGone, ReplicaHung, ReplicaLeft, RouterGone, Unavailable
from cluster.generation.backend import Backend
from cluster.generation.pair_stream import PairGivenUp, PairStream, PrefillBooking
from cluster.generation.prepared_generation import PreparedGeneration, routing_request
from cluster.generation.replica_losses import ReplicaLosses
from cluster.generation.served_model import ServedModel
from cluster.generation.stream_journal import StreamJournal
from cluster.settings.failover import FailoverPolicy
from cluster.telemetry.access_log import AccessRecord
from replicas.handoff.paired_progress import RecomputeReason
from replicas.request import FinishReason, GenerationRequest, RequestProgress, TokenLogprob
from replicas.text.text_stream import TextStream
from router.snapshot import Decision, Rejection, RoutingRequest

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 1.0
_NO_REPLICA_PAUSE_S = 0.1  # between two rejections for want of a replica, each of which has waited in the router before
_QUEUE_SIZE = 256  # messages a slow reader may be behind before its replicas' streams wait


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """What one choice adds to the answer. The last one of each choice, and only it, has a `finish_reason`."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """One per prompt token after the first, in the first delta of each choice, when the request asks for them."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class ChoiceStreams:
    """Use as an async context manager and iterate once. Leaving it cancels whatever still runs, on every replica.

    Iterating raises Overloaded, Unavailable, GenerationFailed, or RequestRejected.
    """

    def __init__(
        self,
        prepared: PreparedGeneration,
        model: ServedModel,
        backend: Backend,
        record: AccessRecord,
        policy: FailoverPolicy,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._prepared = prepared
        self._model = model
        self._backend = backend
        self._record = record
        self._policy = policy
        self._clock = clock
        self._sleep = sleep
        self._queue: asyncio.Queue[ChoiceDelta | Exception] = asyncio.Queue(_QUEUE_SIZE)
        self._tasks: list[asyncio.Task[None]] = []
        self._scored = [asyncio.Event() for _ in prepared.requests]  # prompt -> its log-probabilities are there
        self._prompt_logprobs: list[tuple[TokenLogprob, ...] | None] = [None] * len(prepared.requests)
        self._num_cached = [0] * len(prepared.requests)  # prompt -> its tokens that some choice found cached

    async def __aenter__(self) -> ChoiceStreams:
        self._tasks = [
            asyncio.create_task(self._run_prompt(request, position), name=request.request_id)
            for position, request in enumerate(self._prepared.requests)
        ]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[ChoiceDelta]:
        num_open = self._prepared.num_choices
        while num_open:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item.token_ids and self._record.first_token_s is None:
                self._record.first_token_s = self._clock()
            self._record.num_output_tokens += len(item.token_ids)
            if item.finish_reason is not None:
                num_open -= 1
                self._record.finish_reasons.append(item.finish_reason.value)
            yield item

    async def _run_prompt(self, request: GenerationRequest, position: int) -> None:
        """One prompt: one decision, then all its choices. Any failure goes to the reader as an item."""
        first_index = position * self._prepared.params.n
        emitted: list[StreamJournal] = []
        try:
            decision = await self._acquire(request, num_choices=self._prepared.params.n)
            if self._record.queue_s is None:
                self._record.decided_s = self._clock()
                self._record.queue_s = self._record.decided_s - self._record.started_s
                self._record.predicted_ttft_s = decision.predicted_ttft_s
            booking = PrefillBooking(self._backend, decision, self._prepared.params.n)
            async with asyncio.TaskGroup() as group:
                for choice in range(self._prepared.params.n):
                    params = self._prepared.params.for_choice(choice)
                    journal = StreamJournal(replace(request, choice=choice, params=params))
                    emitted.append(journal)
                    is_scored_apart = choice > 0 and self._prepared.params.prompt_logprobs is not None
                    run = self._run_scored_choice if is_scored_apart else self._run_choice
                    group.create_task(run(journal, first_index + choice, decision, booking))
        except* Exception as errors:  # noqa: BLE001 - passed on: the reader raises it
            await self._queue.put(_first(errors))
        finally:
            self._backend.release(request.request_id, sum(journal.num_tokens for journal in emitted))

    async def _run_scored_choice(self, journal: StreamJournal, index: int, decision: Decision, booking: PrefillBooking) -> None:
        """A choice whose first sibling scores the prompt for both. It waits for that, and then finds the prompt cached."""
        position = index // self._prepared.params.n
        await self._scored[position].wait()
        is_all = self._prepared.params.max_tokens == 0
        reason = FinishReason.LENGTH if is_all else None
        await self._queue.put(ChoiceDelta(index=index, prompt_logprobs=self._prompt_logprobs[position], finish_reason=reason))
        if not is_all:
            await self._run_choice(journal, index, decision, booking)

    async def _run_choice(self, journal: StreamJournal, index: int, decision: Decision, booking: PrefillBooking) -> None:
        request = journal.current_request()
        text = TextStream(self._model.tokenizer, request.params, request.output_ids)
        leases: list[str] = []
        losses = ReplicaLosses(self._policy, self._clock)
        note_loss = partial(self._note_loss, journal, losses)
        try:
            while True:
                try:
                    await self._follow(journal, text, index, decision, _ChoiceEvents(self._record, losses, booking, note_loss))
                    return
                except ReplicaGone as error:
                    pause_s = note_loss(error)
                    if losses.has_waited_enough:
                        raise Unavailable("no replica can take the request: each that could has died or left it") from error
                    await self._sleep(pause_s)
                except PairGivenUp:
                    logger.warning("request %s choice %d runs alone next", request.request_id, request.choice)
                    if leases:  # what is booked on the decode replica, which lives, must not keep it from being the empty one
                        self._backend.release(leases.pop(), journal.num_tokens)
                self._record.num_failovers += 1
                resend = journal.begin_attempt()
                lease = replace(resend, request_id=f"{resend.request_id}-{resend.choice}-{resend.attempt}")
                leases.append(lease.request_id)
                decision = await self._acquire_again(lease, losses.replica_ids, is_alone=losses.is_suspect)
                booking = PrefillBooking(self._backend, decision, num_choices=1)
        finally:
            for lease_id in leases:
                self._backend.release(lease_id, journal.num_tokens)

    def _note_loss(self, journal: StreamJournal, losses: ReplicaLosses, error: ReplicaGone) -> float:
        """Counts a lost replica of a choice, tells the router of a dead one, and returns the seconds to wait before another is
        asked for. Raises GenerationFailed when it was the last one that the choice may take with it."""
        request = journal.current_request()
        logger.warning("request %s choice %d: %s; going on from token %d", request.request_id, request.choice, error, journal.num_tokens)
        pause_s = losses.add(error, journal.num_tokens)
        self._record.num_losses += 1
        if isinstance(error, ReplicaDied) and not isinstance(error, ReplicaHung):
            self._backend.report_gone(error.replica_id)
        if losses.is_condemned:
            raise GenerationFailed(
                f"{losses.num_deaths} replicas died while they ran this request, the last of them when it ran nothing else"
            ) from error
        return pause_s

    def _open(self, journal: StreamJournal, decision: Decision, events: _ChoiceEvents) -> AsyncGenerator[RequestProgress, None]:
        if decision.prefill_replica_id is not None:
            self._record.num_pairs += 1
            return PairStream(self._backend, self._model.name, decision, journal, events).progress()
        events.sent_to(decision.replica_id)
        return self._backend.generate(self._model.name, decision.replica_id, journal.current_request(), decision.replica_role)

    async def _follow(self, journal: StreamJournal, text: TextStream, index: int, decision: Decision, events: _ChoiceEvents) -> None:
        """Streams from the replicas of one decision until the choice is finished. Raises ReplicaGone when they cannot go on."""
        async with aclosing(self._open(journal, decision, events)) as stream:
            async for progress in stream:
                if not journal.try_record(progress):
                    continue
                if progress.token_ids and (pause_s := events.losses.take_pause()) is not None:
                    self._record.pauses_s.append(pause_s)
                # What came before a bad ending may come in one message with it, and is the client's all the same.
                is_cut = progress.finish_reason in (FinishReason.CANCELLED, FinishReason.FAILED)
                delta = text.push(replace(progress, finish_reason=None) if is_cut else progress)
                self._note_cached(index, progress.num_cached_tokens)
                if progress.prompt_logprobs is not None:
                    self._note_scored(index, progress.prompt_logprobs)
                if delta.finish_reason is not None and journal.wants_prompt_logprobs and not self._is_scored(index):
                    raise GenerationFailed("the engine gave no log-probabilities of the prompt")
                if delta.text or delta.token_ids or delta.finish_reason is not None:
                    await self._queue.put(
                        ChoiceDelta(
                            index=index,
                            text=delta.text,
                            token_ids=tuple(delta.token_ids),
                            logprobs=tuple(delta.logprobs),
                            prompt_logprobs=progress.prompt_logprobs,
                            finish_reason=delta.finish_reason,
                            stop_reason=delta.stop_reason,
                        )
                    )
                if delta.finish_reason is not None:
                    return
                if progress.finish_reason is FinishReason.FAILED:
                    key, error = progress.key, progress.error
                    logger.error("request %s choice %d failed on %s: %s", key.request_id, key.choice, decision.replica_id, error)
                    raise GenerationFailed("the engine failed while it ran this request; the server's log has the reason")
                if is_cut:
                    raise ReplicaLeft(decision.replica_id, "it handed the request back")
        raise ReplicaLeft(decision.replica_id, "its stream ended early")

    def _is_scored(self, index: int) -> bool:
        return self._scored[index // self._prepared.params.n].is_set()

    def _note_scored(self, index: int, prompt_logprobs: tuple[TokenLogprob, ...]) -> None:
        position = index // self._prepared.params.n
        self._prompt_logprobs[position] = prompt_logprobs
        self._scored[position].set()

    def _note_cached(self, index: int, num_tokens: int) -> None:
        """Like the prompt tokens they are part of, cached ones count once a prompt, whatever the number of choices."""
        position = index // self._prepared.params.n
        self._num_cached[position] = max(self._num_cached[position], num_tokens)
        self._record.num_cached_tokens = sum(self._num_cached)

    async def _acquire(
        self, request: GenerationRequest, *, num_choices: int, excluded: frozenset[str] = frozenset(), is_alone: bool = False
    ) -> Decision:
        facts = self._model.description
        routing = routing_request(
            self._model.name, request, block_size=facts.block_size, weights_version=facts.weights_version, num_choices=num_choices
        )
        routing = replace(routing, excluded_replicas=excluded, is_alone=is_alone, is_whole=routing.is_whole or is_alone)
        answer = await self._ask_router(routing)
        if isinstance(answer, Rejection):
            if answer.is_unavailable:
                raise Unavailable(answer.reason, answer.retry_after_s)
            raise Overloaded(answer.reason, answer.retry_after_s)
        return answer

    async def _acquire_again(self, request: GenerationRequest, excluded: frozenset[str], *, is_alone: bool) -> Decision:
        """For a choice that lost its replica. It outwaits the router's own limit, which is meant for requests that can still
        be sent elsewhere: a client that has text already cannot, and a restart takes as long as loading the model."""
        deadline_s = self._clock() + self._policy.replica_timeout_s
        while True:
            try:
                return await self._acquire(request, num_choices=1, excluded=excluded, is_alone=is_alone)
            except Unavailable:
                if self._clock() >= deadline_s:
                    raise
            await self._sleep(_NO_REPLICA_PAUSE_S)

    async def _ask_router(self, request: RoutingRequest) -> Decision | Rejection:
        """A dead router is asked again until it is back: queued requests are resubmitted by whoever made them."""
        deadline_s = self._clock() + self._policy.router_timeout_s
        pause_s = 0.1
        while True:
            try:
                return await self._backend.acquire(request)
            except RouterGone as error:
                if self._clock() + pause_s > deadline_s:
                    raise Unavailable("the router is restarting") from error
            await self._sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


@dataclass(frozen=True, slots=True)
class _ChoiceEvents:
    """Notes what happens to the pair of one choice."""

    record: AccessRecord
    losses: ReplicaLosses
    booking: PrefillBooking
    note_loss: Callable[[ReplicaGone], float]

    def sent_to(self, replica_id: str) -> None:
        self.record.note_replica(replica_id)

    def prefill_ended(self) -> None:
        self.booking.end_one()

    def prefill_lost(self, error: ReplicaGone) -> None:
        self.note_loss(error)
        if self.losses.is_suspect:
            raise PairGivenUp from error

    def recomputes(self, reason: RecomputeReason) -> None:
        self.record.recomputes.append(reason)


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    """The first error inside nested groups: the reader can answer with one only."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
