"""Runs one choice to its end, on another replica whenever it loses one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from cluster.backend import Backend
from cluster.failures import BadRequest, GenerationFailed, ReplicaDied, ReplicaGone, ReplicaHung, ReplicaLeft, Unavailable
from cluster.generation.choice_delta import ChoiceDelta
from cluster.generation.decisions import Decisions
from cluster.generation.pair_stream import PairGivenUp, PairStream, PrefillBooking
from cluster.generation.prompt_scores import PromptScores
from cluster.generation.replica_losses import ReplicaLosses
from cluster.generation.request_events import Dispatched, Lost, Moved, Part, Recomputed, RequestEvent, Resumed
from cluster.generation.stream_journal import StreamJournal
from cluster.models.served_model import ServedModel
from cluster.settings.failover import FailoverPolicy
from replicas.handoff.paired_progress import RecomputeReason
from replicas.request import FailureCause, FinishReason, GenerationRequest, RequestProgress
from replicas.text.text_stream import TextStream
from router.snapshot import Decision

logger = logging.getLogger(__name__)

_CUT = (FinishReason.CANCELLED, FinishReason.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Collaborators that all choices of one HTTP request share."""

    model: ServedModel
    backend: Backend
    decisions: Decisions
    policy: FailoverPolicy
    emit: Callable[[RequestEvent], None]
    """Receives events; must not block."""
    put: Callable[[ChoiceDelta], Awaitable[None]]
    """Passes a delta to the reader; waits while the reader is slow."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class ChoiceRun:
    """Owns the emitted part of one choice, which runs on one replica or on a pair (`pair_stream`).

    When a replica dies, the choice continues on another one from its journal, and its reader notices only a pause.
    """

    def __init__(self, request: GenerationRequest, index: int, around: Surroundings, scores: PromptScores | None = None) -> None:
        """`index` of the choice in the answer; `scores` for the choice that computes the prompt's log-probabilities for all choices."""
        self._index = index
        self._around = around
        self._scores = scores
        self._journal = StreamJournal(request)
        self._text = TextStream(around.model.tokenizer, request.params, request.output_ids)
        self._losses = ReplicaLosses(around.policy, around.clock)
        self._booking: PrefillBooking | None = None

    @property
    def num_tokens(self) -> int:
        return self._journal.num_tokens

    async def run(self, decision: Decision, booking: PrefillBooking) -> None:
        """Returns when the choice is finished. Raises GenerationFailed, Unavailable, Overloaded, RequestRejected."""
        around, leases = self._around, list[str]()
        try:
            while True:
                self._booking = booking
                try:
                    await self._follow(decision)
                    return
                except ReplicaGone as error:
                    pause_s = self._note_loss(error)
                    if self._losses.has_waited_enough:
                        raise Unavailable("no replica can take the request: all that could have died or returned it") from error
                    await around.sleep(pause_s)
                except PairGivenUp:
                    logger.warning("request %s choice %d runs alone on its next replica", *self._name)
                    if leases:  # the decode replica is alive, and its booking must not keep it from being the empty one
                        around.backend.release(leases.pop(), self.num_tokens)
                around.emit(Moved(at_s=around.clock(), index=self._index))
                resend = self._journal.begin_attempt()
                lease = replace(resend, request_id=f"{resend.request_id}-{resend.choice}-{resend.attempt}")
                leases.append(lease.request_id)
                decision = await around.decisions.another(lease, excluded=self._losses.replica_ids, is_alone=self._losses.is_suspect)
                booking = PrefillBooking(around.backend, decision, num_choices=1)
        finally:
            for lease_id in leases:
                around.backend.release(lease_id, self.num_tokens)

    # PairListener: called by the stream of a pair.

    def sent_to(self, replica_id: str, part: Part) -> None:
        self._around.emit(Dispatched(at_s=self._around.clock(), index=self._index, replica_id=replica_id, part=part))

    def prefill_ended(self) -> None:
        assert self._booking is not None, "no pair begins before its decision"
        self._booking.end_one()

    def prefill_lost(self, error: ReplicaGone) -> None:
        self._note_loss(error)
        if self._losses.is_suspect:
            raise PairGivenUp from error

    def recomputes(self, reason: RecomputeReason) -> None:
        self._around.emit(Recomputed(at_s=self._around.clock(), index=self._index, reason=reason))

    @property
    def _name(self) -> tuple[str, int]:
        return self._journal.current_request().key

    def _note_loss(self, error: ReplicaGone) -> float:
        """Counts a lost replica, reports a dead one to the router, and returns the seconds to wait before asking for another.
        Raises GenerationFailed when the choice has reached its maximum number of deaths."""
        logger.warning("request %s choice %d: %s; continuing from token %d", *self._name, error, self.num_tokens)
        pause_s = self._losses.add(error, self.num_tokens)
        self._around.emit(Lost(at_s=self._around.clock(), index=self._index, replica_id=error.replica_id))
        if isinstance(error, ReplicaDied) and not isinstance(error, ReplicaHung):
            self._around.backend.report_gone(error.replica_id)
        if self._losses.is_condemned:
            raise GenerationFailed(
                f"{self._losses.num_deaths} replicas died while they ran this request, the last of them when it ran nothing else"
            ) from error
        return pause_s

    def _open(self, decision: Decision) -> AsyncGenerator[RequestProgress, None]:
        backend, model = self._around.backend, self._around.model.name
        if decision.prefill_replica_id is not None:
            return PairStream(backend, model, decision, self._journal, self).progress()
        self.sent_to(decision.replica_id, "whole")
        return backend.generate(model, decision.replica_id, self._journal.current_request(), decision.replica_role)

    async def _follow(self, decision: Decision) -> None:
        """Streams from the replicas of one decision until the choice is finished. Raises ReplicaGone when they cannot finish it."""
        async with aclosing(self._open(decision)) as stream:
            async for progress in stream:
                if self._journal.try_record(progress) and await self._pass_on(progress, decision):
                    return
        raise ReplicaLeft(decision.replica_id, "its stream ended early")

    async def _pass_on(self, progress: RequestProgress, decision: Decision) -> bool:
        """Passes new text and tokens to the reader; True when the choice is finished. Raises ReplicaLeft, GenerationFailed."""
        if progress.token_ids and (pause_s := self._losses.take_pause()) is not None:
            self._around.emit(Resumed(at_s=self._around.clock(), index=self._index, pause_s=pause_s))
        # One message may hold both tokens and a bad ending; the client gets the tokens anyway.
        is_cut = progress.finish_reason in _CUT
        delta = self._text.push(replace(progress, finish_reason=None) if is_cut else progress)
        is_finished = delta.finish_reason is not None
        if self._scores is not None:
            self._note_scores(self._scores, progress, is_finished)
        if delta.text or delta.token_ids or is_finished:
            await self._around.put(
                ChoiceDelta(
                    index=self._index,
                    text=delta.text,
                    token_ids=tuple(delta.token_ids),
                    logprobs=tuple(delta.logprobs),
                    prompt_logprobs=progress.prompt_logprobs,
                    num_cached_tokens=progress.num_cached_tokens,
                    num_accepted_predicted=progress.num_accepted_predicted,
                    num_rejected_predicted=progress.num_rejected_predicted,
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                )
            )
        if is_cut and not is_finished:
            self._raise_cut(progress, decision)
        return is_finished

    def _note_scores(self, scores: PromptScores, progress: RequestProgress, is_finished: bool) -> None:
        if progress.prompt_logprobs is not None:
            scores.note(progress.prompt_logprobs)
        if is_finished and not scores.are_known:
            raise GenerationFailed("the engine gave no log-probabilities of the prompt")

    def _raise_cut(self, progress: RequestProgress, decision: Decision) -> None:
        if progress.finish_reason is FinishReason.CANCELLED:
            raise ReplicaLeft(decision.replica_id, "it handed the request back")
        logger.error("request %s choice %d failed on %s: %s", *progress.key, decision.replica_id, progress.error)
        if progress.failure_cause is FailureCause.GRAMMAR_REFUSED:
            raise BadRequest(f"The grammar of this request cannot be enforced: {progress.error}.", code="invalid_grammar")
        if progress.failure_cause is FailureCause.GRAMMAR_BROKEN:
            raise GenerationFailed(f"the answer cannot follow its grammar to the end: {progress.error}")
        raise GenerationFailed("the engine failed while it ran this request; the server's log has the reason")
