"""What the edge knows of a request besides its body."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.principal import Principal
from replicas.request import TraceContext


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Who asks, when, and what the headers ask for."""

    principal: Principal
    arrival_s: float
    """Unix time."""
    asked_priority: int | None = None
    """By the header; a field of the body goes before it."""
    trace_context: TraceContext = TraceContext()

    def priority(self, of_body: int | None) -> int:
        """The priority that the request gets."""
        return self.principal.granted_priority(self.asked_priority if of_body is None else of_body)
