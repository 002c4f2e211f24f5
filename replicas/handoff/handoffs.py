"""An engine's handoffs: offers the KV of its prefills, and pulls KV for its requests. Used by the engine's thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcache.handoff import HeadShare, KVHandoff, tokens_digest
from kvcache.hashing import CacheIdentity
from kvcache.ownership import Direction, KVOwnership, TransferRef
from kvcache.tensors import KVTensors
from kvcache.transfer.link import Connector
from kvcache.transfer.pull import HandoffPull, PullOutcome
from kvcache.transfer.source import KVSource
from replicas.handoff.other_ranks import OtherRanks
from replicas.handoff.transfer_rate import TransferRate
from replicas.request import FinishReason, GenerationRequest, RequestKey, RequestProgress
from replicas.scheduling.request_state import RequestState, RequestStatus
from replicas.scheduling.scheduler import Scheduler
from replicas.scheduling.step_plan import StepPlan
from replicas.stats import HandoffStats

logger = logging.getLogger(__name__)

MAX_WAIT_S = 0.01
"""Longest sleep of an engine that only waits for transfers."""
PULL_DEADLINE_S = 30.0
LOAD_LEASE_S = 2 * PULL_DEADLINE_S
"""Backstop for a pull that does not end by its own deadlines; longer than any of them."""


@dataclass(slots=True)
class _Load:
    """A request whose KV is pulled from another engine."""

    state: RequestState
    pull: HandoffPull
    number: int  # names the other ranks' pulls
    num_tokens: int
    ref: TransferRef | None = None  # set once its blocks are reserved
    is_closed: bool = False


@dataclass(slots=True)
class HandoffCounters:
    num_offers: int = 0
    num_loaded: int = 0
    num_recomputed: int = 0
    """Handoffs that failed, so that their KV was computed here."""
    num_bytes: int = 0
    transfer_s: float = 0.0
    overlap_s: float = 0.0
    """The part of `transfer_s` before the prefill ended."""


class Handoffs:
    """Owns one engine's offers and pulls. `KVOwnership` owns the blocks' transfers, the Scheduler the requests.

    When a request ends, is cancelled or preempted, its offer or pull ends too. If a pull fails for any reason, the request's
    KV is computed here instead, into the blocks that it already holds. With several ranks, each offers and pulls its own heads;
    a pull succeeds if all ranks' pulls do, and its request continues only when no rank writes for it any more.
    """

    is_open = True

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        ownership: KVOwnership,
        source: KVSource,
        connector: Connector,
        address: str,
        kv_heads: range,
        fingerprint: str,
        ranks: OtherRanks,
        changed: threading.Event | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`source` is served at `address`, with the `kv_heads` of rank 0. `changed` is set when a transfer ends; engines on one
        thread share it. `on_close` stops the server."""
        self.ownership = ownership
        self.source = source
        self.counters = HandoffCounters()
        self.rate = TransferRate()
        self.changed = changed or threading.Event()
        self._scheduler = scheduler
        self._connector = connector
        self._kv: KVTensors = source.kv
        self._fingerprint = fingerprint
        self._share = HeadShare(first=kv_heads.start, end=kv_heads.stop, address=address)
        has_equal_heads = len({group.num_kv_heads for group in self._kv.groups}) == 1
        self._heads = (kv_heads.start, kv_heads.stop) if has_equal_heads else None
        self._num_layers = sum(len(group.layers) for group in self._kv.groups)
        self._ranks = ranks
        ranks.when_changed(self.changed.set)
        self._on_close = on_close
        self._offers: dict[RequestKey, tuple[RequestState, TransferRef]] = {}
        self._handed_over: dict[RequestKey, TransferRef] = {}  # ended here with HANDOFF, lease still open
        self._loads: dict[RequestKey, _Load] = {}
        self._ending: list[HandoffPull] = []  # cancelled pulls whose threads still run

    @property
    def has_work(self) -> bool:
        """Whether transfers hold blocks or pulls run, so that steps must continue until they end."""
        return bool(self._loads or self._ending) or self.ownership.has_transfers

    @property
    def tokens_per_s(self) -> float | None:
        return self.rate.tokens_per_s

    def check_request(self, request: GenerationRequest) -> None:
        """Accepts every request."""

    def wait(self) -> None:
        """Sleeps until a transfer changes something, at most `MAX_WAIT_S`."""
        self.changed.wait(MAX_WAIT_S)
        self.changed.clear()

    def wake(self) -> None:
        self.changed.set()

    def checked_tables(self) -> Sequence[Sequence[int]]:
        self.ownership.check()
        return self.ownership.tables()

    def stats(self) -> HandoffStats:
        counters, ownership = self.counters, self.ownership
        return HandoffStats(
            num_leases=ownership.num_leases,
            num_leases_expired=ownership.counters.num_expired,
            num_offers=counters.num_offers,
            num_loads=counters.num_loaded,
            num_recomputes=counters.num_recomputed,
            num_bytes=counters.num_bytes,
            transfer_s=counters.transfer_s,
            overlap_s=counters.overlap_s,
        )

    def start_pull(self, state: RequestState) -> None:
        """Starts the pull of a newly accepted request with a handoff. If the handoff does not fit, the KV is computed here."""
        request, handoff = state.request, state.request.handoff
        assert handoff is not None, "only a request with a handoff can pull"
        if reason := self._why_not(state, handoff):
            self._note_failure(request, reason)
            return
        pull = HandoffPull(
            handoff,
            self._heads,
            connector=self._connector,
            transfers=self.ownership,
            kv=self._kv,
            on_end=lambda _: self.changed.set(),
            deadline_s=PULL_DEADLINE_S,
            num_others=len(self._ranks.shares),
        )
        number = self._ranks.start_pull(handoff, pull.note_other)
        self._scheduler.expect_load(request.key)
        self._loads[request.key] = _Load(state=state, pull=pull, number=number, num_tokens=handoff.num_tokens)

    def reserve(self) -> None:
        """After scheduling: opens the blocks of newly loading requests to their pulls, and ends the transfers of requests that lost
        their blocks."""
        for state in self._scheduler.take_loads():
            load = self._loads[state.request.key]
            size = self._scheduler.pool.block_size
            first, end = state.num_computed_tokens // size, -(-load.num_tokens // size)
            block_ids = state.block_ids[first:end]
            load.ref = self.ownership.open(Direction.IN, block_ids, lease_s=LOAD_LEASE_S, priority=state.request.priority)
            self._ranks.reserve(load.number, load.ref, block_ids, first)
            load.pull.reserve(load.ref, block_ids, first)
        for key in [k for k, load in self._loads.items() if not (load.state.awaits_load or load.state.is_loading)]:
            self._drop_load(key, "the request lost its blocks or ended")
        for key in [k for k, (state, _) in self._offers.items() if state.status is not RequestStatus.RUNNING]:
            self.source.withdraw(self._offers.pop(key)[1])

    def collect(self) -> list[RequestProgress]:
        """Before scheduling: lets requests whose pulls ended continue, and frees the blocks of closed transfers. Returns the progress
        of these requests. Raises RankLost if a rank is lost while there are transfers."""
        if self.has_work:
            self._ranks.check()
        self._ending = [pull for pull in self._ending if pull.outcome is None]
        ended = [(load, outcome) for load in self._loads.values() if (outcome := load.pull.outcome) is not None]
        for load, outcome in ended:
            self._close_load(load, outcome.error)
        self._forget(self.ownership.collect())
        progress: list[RequestProgress] = []
        for load, outcome in ended:
            if load.ref is None or self.ownership.has_let_go(load.ref):
                del self._loads[load.state.request.key]
                progress += self._end_load(load, outcome)
        for load in self._loads.values():
            if load.ref is not None and not self.ownership.is_open(load.ref):
                load.pull.cancel("the pull took longer than its lease")
        return progress

    def note_step(self, plan: StepPlan) -> list[RequestProgress]:
        """After a step, before `Scheduler.update`: makes the computed KV readable. Returns the new offers."""
        progress: list[RequestProgress] = []
        for chunk in plan.chunks:
            state = chunk.state
            key = state.request.key
            if not state.request.wants_handoff:
                continue
            if key not in self._offers:
                handoff, ref = self._offer(state)
                self._offers[key] = (state, ref)
                progress.append(RequestProgress(key=key, attempt=state.request.attempt, handoff=handoff))
            ref, num_tokens = self._offers[key][1], chunk.start + chunk.num_tokens
            self.source.note_computed(ref, num_tokens)
            self._ranks.note_computed(ref, num_tokens)
        return progress

    def note_progress(self, progress: Sequence[RequestProgress]) -> None:
        """After a step: completes the offers of requests that ended with HANDOFF, withdraws those of requests that ended otherwise."""
        for item in progress:
            offer = None if item.finish_reason is None else self._offers.get(item.key)
            if offer is None or offer[0].request.attempt != item.attempt:  # the ending of an older attempt
                continue
            del self._offers[item.key]
            ref = offer[1]
            if item.finish_reason is FinishReason.HANDOFF:
                self.source.complete(ref, item.token_ids)
                self._ranks.complete(ref, item.token_ids)
                self._handed_over[item.key] = ref
            else:
                self.source.withdraw(ref)

    def drop(self, key: RequestKey) -> None:
        """Ends the pull or offer of a cancelled request, also of one that has ended with HANDOFF."""
        if key in self._loads:
            self._drop_load(key, "the request was cancelled")
        if key in self._offers:
            self.source.withdraw(self._offers.pop(key)[1])
        if key in self._handed_over:
            self.source.withdraw(self._handed_over.pop(key))

    def close(self, timeout_s: float = 5.0) -> None:
        """Aborts every transfer and waits for its thread, until all blocks are back in the pool or `timeout_s` has passed."""
        for key in list(self._loads):
            self._drop_load(key, "the engine closes")
        for pull in self._ending:
            pull.join(timeout_s)
        for ref in self.ownership.refs():
            self.ownership.close(ref)
        until_s = time.monotonic() + timeout_s
        while self.ownership.has_transfers and time.monotonic() < until_s:
            self._forget(self.ownership.collect())
            self.wait()
        self._on_close()

    def _offer(self, state: RequestState) -> tuple[KVHandoff, TransferRef]:
        num_tokens = len(state.token_ids)
        block_ids = state.block_ids[: -(-num_tokens // self._scheduler.pool.block_size)]
        ref = self.ownership.open(Direction.OUT, block_ids, priority=state.request.priority, on_closing=self.source.wake)
        self.source.offer(ref, block_ids, num_tokens)
        self._ranks.offer(ref, block_ids, num_tokens)
        self.counters.num_offers += 1
        handoff = KVHandoff(
            fingerprint=self._fingerprint,
            layout_id=self._kv.layout.id,
            block_size=self._kv.block_size,
            dtype=_dtype_name(self._kv),
            num_tokens=num_tokens,
            tokens_digest=tokens_digest(self._identity(state.request), state.token_ids),
            layers=(0, self._num_layers),
            block_ids=tuple(block_ids),
            epoch=ref.epoch,
            lease=ref.number,
            lease_s=self.ownership.lease_s,
            shares=(self._share, *self._ranks.shares),
        )
        return handoff, ref

    def _why_not(self, state: RequestState, handoff: KVHandoff) -> str | None:
        """Why a handoff is not this request's KV or not compatible with this engine; None if it can be pulled."""
        ours = {
            "fingerprint": self._fingerprint,
            "block_size": self._kv.block_size,
            "dtype": _dtype_name(self._kv),
            "layers": (0, self._num_layers),
        }
        for name, value in ours.items():
            if getattr(handoff, name) != value:
                return f"its {name} is {getattr(handoff, name)!r}, here it is {value!r}"
        if not 0 < handoff.num_tokens <= len(state.token_ids):
            return f"it covers {handoff.num_tokens} tokens, the request has {len(state.token_ids)}"
        if handoff.tokens_digest != tokens_digest(self._identity(state.request), state.token_ids[: handoff.num_tokens]):
            return "it is the KV of other tokens or of another cache identity"
        return None

    def _identity(self, request: GenerationRequest) -> CacheIdentity:
        weights_version = self._scheduler.config.weights_version
        return CacheIdentity(salt=request.cache_salt, adapter_id=request.adapter_id, weights_version=weights_version)

    def _close_load(self, load: _Load, error: str | None) -> None:
        """Closes the transfer of a load. Once that has let go, no rank writes for it any more."""
        if load.is_closed:
            return
        load.is_closed = True
        if load.ref is not None:
            self.ownership.close(load.ref)
        if error is not None:
            self._ranks.cancel(load.number, error)

    def _end_load(self, load: _Load, outcome: PullOutcome) -> list[RequestProgress]:
        is_whole = outcome.error is None and load.ref is not None
        if is_whole:
            self.counters.num_loaded += 1
            self.counters.num_bytes += outcome.num_bytes
            self.counters.transfer_s += outcome.transfer_s
            self.counters.overlap_s += outcome.overlap_s
            self.rate.add(load.num_tokens - load.state.num_computed_tokens, outcome.transfer_s)
        else:
            self._note_failure(load.state.request, outcome.error or "it ended before its blocks were reserved")
        progress = self._scheduler.end_load(load.state.request.key, load.num_tokens if is_whole else 0, outcome.output_ids)
        return [] if progress is None else [progress]

    def _forget(self, refs: Sequence[TransferRef]) -> None:
        self.source.forget(refs)
        for key in [key for key, ref in self._handed_over.items() if ref in refs]:
            del self._handed_over[key]

    def _drop_load(self, key: RequestKey, reason: str) -> None:
        load = self._loads.pop(key)
        self._close_load(load, reason)
        load.pull.cancel(reason)
        self._ending.append(load.pull)

    def _note_failure(self, request: GenerationRequest, reason: str) -> None:
        self.counters.num_recomputed += 1
        logger.warning("request %s choice %d: its handoff fails, its KV is computed here: %s", request.request_id, request.choice, reason)


def _dtype_name(kv: KVTensors) -> str:
    return str(kv.dtype).removeprefix("torch.")
