"""How urgent a request may be: what its body or header asks for, within what its tenant is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.failures import BadRequest

MAX_PRIORITY = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityRules:
    """Smaller numbers are more urgent; requests that ask for nothing have 0."""

    header: str = "X-Priority"
    """Header that asks for a priority; the field `priority` of a body goes before it."""
    highest: int | None = None
    """The most urgent priority of tenants that `highest_by_tenant` does not name; None sets no limit."""
    highest_by_tenant: Mapping[str, int] = field(default_factory=dict)
    """The most urgent priority of each tenant. Whoever asks for more gets this."""

    def __post_init__(self) -> None:
        if not self.header.replace("-", "").isalnum():
            raise ValueError(f"header must be the name of an HTTP header, got {self.header!r}")
        for name, value in (("highest", self.highest), *(("highest_by_tenant", limit) for limit in self.highest_by_tenant.values())):
            if value is not None and abs(value) > MAX_PRIORITY:
                raise ValueError(f"{name} must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, got {value}")

    def asked_for(self, header_value: str | None) -> int | None:
        """Raises BadRequest naming the header."""
        if header_value is None:
            return None
        text = header_value.strip()
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= len(str(MAX_PRIORITY)) and int(digits) <= MAX_PRIORITY):
            raise BadRequest(
                f"Invalid value for header '{self.header}': must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}, got {text[:40]!r}.",
                param=self.header,
                code="invalid_value",
            )
        return int(text)

    def granted(self, tenant: str, asked: int | None) -> int:
        """The priority that a request of `tenant` gets."""
        highest = self.highest_by_tenant.get(tenant, self.highest)
        return (asked or 0) if highest is None else max(asked or 0, highest)
