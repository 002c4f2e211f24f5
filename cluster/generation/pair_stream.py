"""One choice on two replicas, prefill on one and decode on the other, merged into one stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Protocol

from cluster.backend import Backend
from cluster.failures import ReplicaGone, ReplicaHung, ReplicaLeft
from cluster.generation.request_events import Part
from cluster.generation.stream_journal import StreamJournal
from replicas.engine_config import Role
from replicas.handoff.paired_progress import BAD_ENDINGS, PairedProgress, RecomputeReason
from replicas.request import FinishReason, GenerationRequest, RequestProgress
from router.snapshot import Decision

logger = logging.getLogger(__name__)


class PairGivenUp(Exception):
    """The choice must not continue on the rest of its pair, and needs a new decision. The loss was reported to the listener before."""


class PairListener(Protocol):
    """Receives the events of a pair that its stream does not show."""

    def sent_to(self, replica_id: str, part: Part) -> None:
        """Called when a replica gets a part of the choice."""
        ...

    def prefill_ended(self) -> None:
        """Called once per pair: its prefill replica has handed over, failed, or was cancelled."""
        ...

    def prefill_lost(self, error: ReplicaGone) -> None:
        """Called when the prefill replica is lost. An exception raised here ends the pair: PairGivenUp, or the choice's own error."""
        ...

    def recomputes(self, reason: RecomputeReason) -> None:
        """Called when the decode replica gets the choice again, without a handoff."""
        ...


class PrefillBooking:
    """The booking of a decision on its prefill replica. It ends once, when all choices have ended there."""

    def __init__(self, backend: Backend, decision: Decision, num_choices: int) -> None:
        self._backend = backend
        self._request_id = decision.request_id
        self._num_open = num_choices

    def end_one(self) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._backend.release_prefill(self._request_id)


class PairStream:
    """Owns the streams of one choice from both replicas of a decision.

    The decode replica gets the choice as soon as the handoff exists, and pulls KV while the prefill replica still computes. When the
    prefill replica is lost before that, the decode replica gets the choice without a handoff, with the journal's tokens and a higher
    attempt. When it is lost later, the decode replica notices this by itself and continues. A prefill replica that hangs breaks no link,
    so this class also watches for a hang until the decode replica has produced a token.
    """

    def __init__(self, backend: Backend, model: str, decision: Decision, journal: StreamJournal, listener: PairListener) -> None:
        """The reader of `progress` must record each message in `journal` before it asks for the next one."""
        assert decision.prefill_replica_id is not None, "a decision for one replica needs no pair"
        self._backend, self._model = backend, model
        self._prefill_id, self._decode_id, self._decode_role = decision.prefill_replica_id, decision.replica_id, decision.replica_role
        self._journal, self._listener = journal, listener
        self._request = journal.current_request()
        self._merge = PairedProgress(self._request)
        self._prefill: _Side | None = None
        self._decode: _Side | None = None
        self._hang: asyncio.Task[None] | None = None  # ends when the prefill replica hangs after its part, with KV not pulled yet
        self._resend_reason: RecomputeReason | None = None

    async def progress(self) -> AsyncGenerator[RequestProgress, None]:
        """Iterate once. Closing the iterator cancels the choice on both replicas.

        Raises ReplicaGone only for the decode replica, RequestRejected from either, and the exceptions of `PairListener.prefill_lost`.
        """
        self._prefill = self._open(self._prefill_id, "prefill", replace(self._request, wants_handoff=True))
        is_finished = False
        try:
            while not is_finished:
                item = await self._next()
                if item is not None:
                    yield item
                    is_finished = item.finish_reason is not None
                if self._resend_reason is not None:
                    await self._resend(self._resend_reason)
        finally:
            await self._close()

    async def _next(self) -> RequestProgress | None:
        """Waits for one message of either side; None when it contains nothing new for the reader."""
        sides = [side for side in (self._prefill, self._decode) if side is not None and not side.is_over]
        if len(sides) > 1 or self._hang is not None:
            watched = [] if self._hang is None else [self._hang]
            await asyncio.wait([*(side.ask() for side in sides), *watched], return_when=asyncio.FIRST_COMPLETED)
        if self._prefill is not None and (len(sides) == 1 or self._prefill.has_answer):
            return await self._take_prefill(self._prefill)
        assert self._decode is not None, "without a prefill side there is a decode side"
        if self._hang is not None and not self._decode.has_answer:
            # Not counted as a death, because the choice had already ended there.
            await self._lose_prefill(ReplicaLeft(self._prefill_id, "it hangs with KV that was not taken"), breaks_link=False)
            return None
        return await self._take_decode(self._decode)

    async def _take_prefill(self, side: _Side) -> RequestProgress | None:
        try:
            item = await self._good_message(side)
        except ReplicaGone as error:
            await self._lose_prefill(error, breaks_link=not isinstance(error, ReplicaHung))
            return None
        told = self._merge.take_prefill(item)
        self._resend_reason = self._merge.resend_reason
        if side.is_over:
            await self._end_prefill()
        is_answered = told is not None and told.finish_reason is not None
        if item.handoff is not None and self._decode is None and not is_answered and not self._request.ends_with_its_first_token:
            self._decode = self._open(self._decode_id, self._decode_role, replace(self._request, handoff=item.handoff))
        if self._prefill is None and self._decode is not None and not is_answered and not self._merge.has_decoded:
            self._hang = asyncio.create_task(self._backend.wait_hung(self._prefill_id))
        return told

    async def _good_message(self, side: _Side) -> RequestProgress:
        """The next message of the prefill replica. Raises ReplicaGone when it ends without having done its part."""
        item = await side.next()
        if item is None:
            raise ReplicaLeft(self._prefill_id, "its stream ended early")
        if item.finish_reason in BAD_ENDINGS:
            raise ReplicaLeft(self._prefill_id, item.error or "it handed the request back")
        if item.finish_reason is FinishReason.HANDOFF and self._decode is None and item.handoff is None:
            raise ReplicaLeft(self._prefill_id, "it ended without an offer of its KV")
        return item

    async def _take_decode(self, side: _Side) -> RequestProgress | None:
        item = await side.next()
        if item is None:
            raise ReplicaLeft(self._decode_id, "its stream ended early")
        told = self._merge.take_decode(item)
        if self._merge.has_decoded:
            self._stop_watching()
        self._resend_reason = self._merge.resend_reason
        return told

    async def _lose_prefill(self, error: ReplicaGone, *, breaks_link: bool) -> None:
        self._stop_watching()
        await self._end_prefill()
        self._listener.prefill_lost(error)
        self._merge.lose_prefill()
        needs_all = self._decode is None or not (breaks_link or self._merge.has_decoded)
        self._resend_reason = "prefill_lost" if needs_all else self._merge.resend_reason

    async def _resend(self, reason: RecomputeReason) -> None:
        request = self._journal.begin_attempt()
        logger.warning(
            "request %s choice %d: %s; replica %s computes it from token %d on",
            request.request_id, request.choice, reason, self._decode_id, self._journal.num_tokens,
        )  # fmt: skip
        self._listener.recomputes(reason)
        self._stop_watching()
        await self._end_prefill()
        if self._decode is not None:
            await self._decode.close()
        self._merge = PairedProgress(request)
        self._merge.lose_prefill()
        self._resend_reason = None
        self._decode = self._open(self._decode_id, self._decode_role, request)

    def _open(self, replica_id: str, role: Role, request: GenerationRequest) -> _Side:
        self._listener.sent_to(replica_id, "prefill" if request.wants_handoff else "decode")
        return _Side(self._backend.generate(self._model, replica_id, request, role))

    async def _end_prefill(self) -> None:
        if self._prefill is not None:
            side, self._prefill = self._prefill, None
            try:
                await side.close()
            finally:
                self._listener.prefill_ended()

    def _stop_watching(self) -> None:
        if self._hang is not None:
            self._hang.cancel()
            self._hang = None

    async def _close(self) -> None:
        self._stop_watching()
        if self._decode is not None:
            self._decode.cancel()
        try:
            await self._end_prefill()
        finally:
            if self._decode is not None:
                await self._decode.close()


class _Side:
    """Owns one replica's stream, and reads at most one message ahead."""

    def __init__(self, stream: AsyncGenerator[RequestProgress, None]) -> None:
        self.is_over = False
        self._stream = stream
        self._asked: asyncio.Task[RequestProgress | None] | None = None

    def ask(self) -> asyncio.Task[RequestProgress | None]:
        """Starts waiting for the next message, which `next` returns; repeated calls give the same task."""
        if self._asked is None:
            self._asked = asyncio.create_task(self._read())
        return self._asked

    @property
    def has_answer(self) -> bool:
        return self._asked is not None and self._asked.done()

    async def next(self) -> RequestProgress | None:
        """The next message; None after the last one. Raises the stream's exceptions."""
        item = await (self._read() if self._asked is None else self._asked)
        self._asked = None
        self.is_over = item is None or item.finish_reason is not None
        return item

    def cancel(self) -> None:
        """Starts closing the stream, without waiting."""
        if self._asked is not None:
            self._asked.cancel()

    async def close(self) -> None:
        """Cancels the request on the replica, unless it has ended there."""
        self.cancel()
        if self._asked is not None:
            await asyncio.gather(self._asked, return_exceptions=True)
        await self._stream.aclose()

    async def _read(self) -> RequestProgress | None:
        return await anext(self._stream, None)
