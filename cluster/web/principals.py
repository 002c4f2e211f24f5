"""From the head of a request to who asks: the one place where a principal is made."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.principal import DEFAULT_TENANT, Principal
from cluster.settings.gateway_config import GatewayConfig

_MAX_TENANT_CHARS = 128


class Principals:
    """Knows the rules of the configuration. The tenant header is believed: a proxy in front must have checked it."""

    def __init__(self, config: GatewayConfig) -> None:
        self._tenant_header = config.tenant_header.lower().encode()
        self._rules = config.priorities
        self._limits = config.limits

    def of(self, headers: Mapping[bytes, bytes]) -> Principal:
        """`headers` have names in lower case, as ASGI gives them."""
        tenant = headers.get(self._tenant_header, b"").decode("latin-1")[:_MAX_TENANT_CHARS] or DEFAULT_TENANT
        return Principal(tenant=tenant, highest_priority=self._rules.highest_of(tenant), limits=self._limits)
