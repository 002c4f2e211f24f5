"""Who asks, and what they may. Made in one place, at the edge: `cluster/web/principals.py`."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.settings.limits import RequestLimits

DEFAULT_TENANT = "default"
"""Shared by all requests that name no tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The rights behind one request."""

    tenant: str = DEFAULT_TENANT
    highest_priority: int | None = None
    """The most urgent priority that it gets; None sets no limit."""
    limits: RequestLimits = RequestLimits()

    def granted_priority(self, asked: int | None) -> int:
        """Smaller is more urgent; requests that ask for nothing have 0, or the highest that is allowed."""
        return (asked or 0) if self.highest_priority is None else max(asked or 0, self.highest_priority)
