"""Counters and load of one model's router, for metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from router.snapshot import RejectionKind, RoutingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingStatistics:
    """A snapshot of one model. Counters only grow; a replica's counters disappear with the replica."""

    num_waiting: Mapping[int, int]
    """priority -> requests in the queue"""
    num_bookings: int
    num_prefill_bookings: int
    """Pairs whose prompt is still with the prefill pool."""
    num_replicas: Mapping[str, int]
    """state (usable, draining, fenced, reserved) -> replicas"""
    num_usable_by_pool: Mapping[str, int]
    """role -> replicas that may take work"""
    num_decisions: Mapping[str, int]
    """kind (first, resend, alone) -> decisions"""
    num_plans: Mapping[str, int]
    """plan (pair, or the role of the replica that does it all) -> decisions"""
    num_rejections: Mapping[RejectionKind, int]
    num_prompt_tokens: Mapping[str, int]
    """replica id -> prompt tokens sent there to be computed"""
    num_cached_tokens: Mapping[str, int]
    """replica id -> the part of `num_prompt_tokens` that was known to be cached there"""


@dataclass(slots=True)
class RoutingCounters:
    """Owns the counters behind `RoutingStatistics`."""

    decisions: Counter[str] = field(default_factory=Counter)
    plans: Counter[str] = field(default_factory=Counter)
    rejections: Counter[RejectionKind] = field(default_factory=Counter)
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    cached_tokens: Counter[str] = field(default_factory=Counter)

    def note_decision(self, request: RoutingRequest, replica_id: str, num_cached_tokens: int) -> None:
        self.decisions["alone" if request.is_alone else "resend" if request.attempt else "first"] += 1
        self.prompt_tokens[replica_id] += request.num_prompt_tokens
        self.cached_tokens[replica_id] += num_cached_tokens

    def note_rejection(self, kind: RejectionKind) -> None:
        self.rejections[kind] += 1

    def forget_replica(self, replica_id: str) -> None:
        del self.prompt_tokens[replica_id]
        del self.cached_tokens[replica_id]
