"""The sender of a request and its rights. Made in one place, at the HTTP edge: `cluster/web/principals.py`."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.settings.limits import RequestLimits

DEFAULT_TENANT = "default"
"""The tenant of all requests that name none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The rights of one request's sender."""

    tenant: str = DEFAULT_TENANT
    highest_priority: int | None = None
    """The most urgent priority that it may have; None sets no limit."""
    limits: RequestLimits = RequestLimits()

    def granted_priority(self, asked: int | None) -> int:
        """The requested priority (default 0), limited to the most urgent one allowed; smaller is more urgent."""
        return (asked or 0) if self.highest_priority is None else max(asked or 0, self.highest_priority)
