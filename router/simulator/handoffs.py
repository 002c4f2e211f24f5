"""KV transfers from prefill to decode replicas, over links of a given speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from replicas.request import RequestKey
from router.simulator.replica import SimulatedReplica

Schedule = Callable[[float, Callable[[], None]], None]
"""Schedules a call at a time of the simulation."""


@dataclass(slots=True)
class _Handoff:
    source: SimulatedReplica
    target: SimulatedReplica
    num_tokens: int
    num_computed: int = 0  # readable at the source
    num_moved: int | None = None  # tokens at the target, including cached ones; None before it has room
    is_moving: bool = False
    moving_s: float = 0.0
    moved_tokens: int = 0


class SimulatedHandoffs:
    """Owns every handoff under way, and the time when the link of each pair is free.

    As in production, the target pulls: once it has blocks, it reads the tokens that are readable at the source and that it has not
    cached, chunk by chunk during the prefill. The source's blocks stay held until everything is moved. Handoffs of one pair of replicas
    use its link one at a time.
    """

    def __init__(self, token_s: float, schedule: Schedule, on_arrival: Callable[[SimulatedReplica], None]) -> None:
        """`token_s`: transfer time of the KV of one token. `on_arrival` is called with a target that has a prompt's whole KV."""
        self._token_s = token_s
        self._schedule = schedule
        self._on_arrival = on_arrival
        self._handoffs: dict[RequestKey, _Handoff] = {}
        self._free_s: dict[tuple[str, str], float] = {}  # source and target -> when their link is free
        self.num_moved_tokens = 0
        self.moving_s = 0.0

    def __len__(self) -> int:
        return len(self._handoffs)

    def note_computed(
        self, key: RequestKey, num_computed: int, num_tokens: int, source: SimulatedReplica, target: SimulatedReplica, now_s: float
    ) -> bool:
        """Records that the source computed the first `num_computed` of the prompt's `num_tokens`; True for a new handoff."""
        handoff = self._handoffs.get(key)
        is_new = handoff is None
        if handoff is None:
            handoff = self._handoffs[key] = _Handoff(source, target, num_tokens)
        handoff.num_computed = max(handoff.num_computed, num_computed)
        self._move(key, handoff, now_s)
        return is_new

    def note_room(self, key: RequestKey, num_cached: int, now_s: float) -> None:
        """Records that the target has blocks for the request, with the first `num_cached` tokens cached."""
        handoff = self._handoffs.get(key)
        if handoff is not None:
            handoff.num_moved = num_cached
            self._move(key, handoff, now_s)

    def drop(self, key: RequestKey) -> bool:
        """Drops the handoff of a request that ended with its first token. False when the request has no handoff."""
        handoff = self._handoffs.pop(key, None)
        if handoff is None:
            return False
        handoff.source.return_blocks(key)
        handoff.target.cancel(key)
        return True

    def _move(self, key: RequestKey, handoff: _Handoff, now_s: float) -> None:
        if handoff.num_moved is None or handoff.is_moving:
            return
        if handoff.num_moved >= handoff.num_tokens:
            if handoff.num_computed >= handoff.num_tokens:
                self._end(key, handoff)
            return
        num = handoff.num_computed - handoff.num_moved
        if num > 0:
            link = handoff.source.replica_id, handoff.target.replica_id
            end_s = max(now_s, self._free_s.get(link, 0.0)) + num * self._token_s
            self._free_s[link] = end_s
            handoff.is_moving = True
            handoff.moving_s += num * self._token_s
            handoff.moved_tokens += num
            self._schedule(end_s, partial(self._moved, key, handoff, num, end_s))

    def _moved(self, key: RequestKey, handoff: _Handoff, num: int, now_s: float) -> None:
        if self._handoffs.get(key) is not handoff or handoff.num_moved is None:
            return
        handoff.is_moving = False
        handoff.num_moved += num
        self._move(key, handoff, now_s)

    def _end(self, key: RequestKey, handoff: _Handoff) -> None:
        del self._handoffs[key]
        self.num_moved_tokens += handoff.moved_tokens
        self.moving_s += handoff.moving_s
        handoff.source.return_blocks(key)
        handoff.target.note_arrived(key, handoff.num_tokens, handoff.moved_tokens, handoff.moving_s)
        self._on_arrival(handoff.target)
