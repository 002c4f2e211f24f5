"""Everything that the HTTP edge knows about a request besides its body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.principal import Principal
from cluster.settings.latency_targets import LatencyTarget, target_for
from replicas.request import TraceContext


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Who sent the request, when, and the wishes in its headers."""

    principal: Principal
    arrival_s: float
    """Unix time."""
    asked_priority: int | None = None
    """Priority in the header; a priority in the body takes precedence."""
    asked_ttft_s: float | None = None
    asked_tpot_s: float | None = None
    trace_context: TraceContext = TraceContext()

    def target(self, targets: Sequence[LatencyTarget], priority: int) -> LatencyTarget | None:
        """The entry of the model's `targets` that applies to the request. Headers can only make it stricter."""
        target = target_for(targets, priority)
        return None if target is None else target.lowered(self.asked_ttft_s, self.asked_tpot_s)

    def priority(self, of_body: int | None) -> int:
        """The priority granted to the request."""
        return self.principal.granted_priority(self.asked_priority if of_body is None else of_body)
