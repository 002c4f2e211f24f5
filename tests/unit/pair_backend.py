"""A Backend of one prefill and two decode replicas that follow a script: token i of every answer is FIRST_TOKEN + i."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Literal

from cluster.failures import ReplicaGone, ReplicaHung
from kvcache.handoff import HeadShare, KVHandoff
from replicas.engine_config import Role
from replicas.request import FinishReason, GenerationRequest, RequestKey, RequestProgress, RequestRejected, TokenLogprob
from router.snapshot import Decision, RoutingRequest
from tests.unit.fake_backend import FakeBackend

FIRST_TOKEN = 500
NUM_OUTPUT = 6
Moment = Literal["first chunk", "handed over", "overtaken", "begun", "first token", "decoding"]
PREFILL_MOMENTS: tuple[Moment, ...] = ("first chunk", "handed over")
DECODE_MOMENTS: tuple[Moment, ...] = ("begun", "first token", "decoding")
Loss = type[ReplicaGone] | FinishReason


class PairBackend(FakeBackend):
    """The router names the pair `p`, `d` until `d` is excluded, then `p`, `d2`; and `d2` alone for what must be whole.

    At a moment of `losses` the replica that comes there first is lost in that way. At `pause_at` everybody stops for good and
    `is_paused` is set. A decode replica waits for the end of the prefill, except for that of a replica that hangs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[Moment, Loss] = {}
        self.pause_at: Moment | None = None
        self.is_paused = asyncio.Event()
        self.is_decode_first = False
        """The decode replica's message with the first token arrives before the prefill replica's."""
        self.first_decoded = FIRST_TOKEN
        self.can_take_over = True
        """Else a decode replica waits for ever for what a prefill replica has offered."""
        self.rejects_prefills = False
        self.sent: list[tuple[str, Role, GenerationRequest]] = []
        self.num_open: Counter[str] = Counter()
        self._computed: dict[RequestKey, asyncio.Event] = {}
        self._told: dict[RequestKey, asyncio.Event] = {}

    def decide(self, request: RoutingRequest) -> Decision:
        decode_id = "d2" if "d" in request.excluded_replicas or request.is_whole else "d"
        prefill_id = None if request.is_whole else "p"
        return Decision(request_id=request.request_id, replica_id=decode_id, replica_role="decode", prefill_replica_id=prefill_id)

    async def generate(
        self, model: str, replica_id: str, request: GenerationRequest, role: Role = "unified"
    ) -> AsyncGenerator[RequestProgress, None]:
        self.sent.append((replica_id, role, request))
        self.num_open[replica_id] += 1
        script = self._prefill(replica_id, request) if request.wants_handoff else self._decode(replica_id, request)
        try:
            async for progress in script:
                yield progress
        finally:
            await script.aclose()
            self.num_open[replica_id] -= 1

    async def _prefill(self, replica_id: str, request: GenerationRequest) -> AsyncGenerator[RequestProgress, None]:
        if self.rejects_prefills:
            raise RequestRejected("the prompt is too long for this replica")
        computed = self._computed[request.key] = asyncio.Event()
        told = self._told[request.key] = asyncio.Event()
        is_hung = False
        try:
            async for progress in self._lost_at("first chunk", replica_id, request):
                yield progress
            yield RequestProgress(key=request.key, attempt=request.attempt, handoff=HANDOFF)
            async for progress in self._lost_at("handed over", replica_id, request):
                yield progress
            if self.is_decode_first:
                computed.set()
                await told.wait()
                async for progress in self._lost_at("overtaken", replica_id, request):
                    yield progress
            (only,) = _answer(request, len(request.output_ids), len(request.output_ids) + 1)
            yield only if only.finish_reason is not None else replace(only, finish_reason=FinishReason.HANDOFF)
        except ReplicaHung:
            is_hung = True
            raise
        finally:
            if not is_hung:
                computed.set()

    async def _decode(self, replica_id: str, request: GenerationRequest) -> AsyncGenerator[RequestProgress, None]:
        async for progress in self._lost_at("begun", replica_id, request):
            yield progress
        position = len(request.output_ids)
        if request.handoff is not None:
            await (self._computed[request.key] if self.can_take_over else asyncio.Event()).wait()
            (first,) = _answer(request, position, position + 1)
            is_handed = self.is_decode_first
            yield replace(
                first, token_ids=(self.first_decoded,) if position == 0 else first.token_ids, logprobs=() if is_handed else first.logprobs
            )
            self._told[request.key].set()
            position += 1
        async for progress in self._lost_at("first token", replica_id, request):
            yield progress
        for progress in _answer(request, position, position + 2):
            yield progress
        async for progress in self._lost_at("decoding", replica_id, request):
            yield progress
        for progress in _answer(request, position + 2, request.params.max_tokens or 0):
            yield progress

    async def _lost_at(self, moment: Moment, replica_id: str, request: GenerationRequest) -> AsyncGenerator[RequestProgress, None]:
        if moment == self.pause_at:
            self.is_paused.set()
            await asyncio.Event().wait()
        loss = self.losses.pop(moment, None)
        if isinstance(loss, FinishReason):
            yield RequestProgress(key=request.key, attempt=request.attempt, finish_reason=loss, error="as told")
            await asyncio.Event().wait()  # nobody asks for more
        elif loss is not None:
            raise loss(replica_id, "as told")


def _answer(request: GenerationRequest, start: int, stop: int) -> list[RequestProgress]:
    """One message for each token; the last one of the answer ends it."""
    last = (request.params.max_tokens or 0) - 1
    return [
        RequestProgress(
            key=request.key,
            attempt=request.attempt,
            token_ids=(FIRST_TOKEN + index,),
            logprobs=() if request.params.logprobs is None else (logprob(FIRST_TOKEN + index),),
            finish_reason=FinishReason.LENGTH if index == last else None,
        )
        for index in range(start, min(stop, last + 1))
    ]


def logprob(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, -token_id / 1000, ())


HANDOFF = KVHandoff(
    fingerprint="f", layout_id="hdt-htd", block_size=16, dtype="float32", num_tokens=2, tokens_digest="d", layers=(0, 1),
    block_ids=(1,), epoch=1, lease=1, lease_s=5.0, shares=(HeadShare(first=0, end=1, address="x"),),
)  # fmt: skip
