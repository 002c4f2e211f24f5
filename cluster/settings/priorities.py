"""How urgent the requests of each tenant may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_PRIORITY = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityRules:
    """Smaller numbers are more urgent; requests that ask for nothing have 0."""

    header: str = "X-Priority"
    """Header that asks for a priority; the field `priority` of a body goes before it."""
    highest: int | None = 0
    """The most urgent priority of tenants that `highest_by_tenant` does not name; None sets no limit."""
    highest_by_tenant: Mapping[str, int] = field(default_factory=dict)
    """The most urgent priority of each tenant, e.g. {gold: -10, batch: 5}. Requests that ask for more get this, and so do those that ask
    for nothing if it is above 0."""

    def __post_init__(self) -> None:
        if not self.header.replace("-", "").isalnum():
            raise ValueError(f"header must be the name of an HTTP header, got {self.header!r}")
        for name, value in (("highest", self.highest), *(("highest_by_tenant", limit) for limit in self.highest_by_tenant.values())):
            if value is not None and abs(value) > MAX_PRIORITY:
                raise ValueError(f"{name} must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, got {value}")

    @property
    def cautions(self) -> tuple[str, ...]:
        """A line for each tenant that may never be as urgent as the rest: a larger number may have been meant as more urgent."""
        return tuple(
            f"gateway.priorities.highest_by_tenant: {tenant}: {limit} makes {tenant} less urgent than tenants without an entry; smaller "
            f"numbers are more urgent, e.g. {tenant}: {-limit}"
            for tenant, limit in self.highest_by_tenant.items()
            if limit > max(0, self.highest or 0)
        )

    def highest_of(self, tenant: str) -> int | None:
        """The most urgent priority that a request of `tenant` may have; None sets no limit."""
        return self.highest_by_tenant.get(tenant, self.highest)
