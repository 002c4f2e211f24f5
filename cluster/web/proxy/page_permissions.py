"""Which web pages may read the answers that are made in front of the gateway."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders

_ANY_ORIGIN = "*"
_PERMISSION = "access-control-allow-origin"
_REPEATED = (_PERMISSION, "access-control-expose-headers", "vary")


class PagePermissions:
    """Owns the permissions that gateways gave last: only they know the configuration, and every page asks them first, with a preflight.

    As many as the configuration names origins.
    """

    def __init__(self) -> None:
        self._by_origin: dict[str, dict[str, str]] = {}  # origin, or * -> headers of an answer to it

    def note(self, origin: str, status: int, headers: Headers) -> None:
        """Learns from an answer that may be a gateway's."""
        allowed = headers.get(_PERMISSION)
        if allowed is not None:
            self._by_origin[_ANY_ORIGIN if allowed == _ANY_ORIGIN else origin] = {
                name: headers[name] for name in _REPEATED if name in headers
            }
        elif status < 400 or "origin" in headers.get("vary", "").lower():  # a gateway's, which gives this page none
            self._by_origin.pop(origin, None)
            self._by_origin.pop(_ANY_ORIGIN, None)

    def add_to(self, headers: MutableHeaders, origin: str) -> None:
        """Adds what the gateway would add to an answer that it has not seen."""
        for name, value in (self._by_origin.get(origin) or self._by_origin.get(_ANY_ORIGIN) or {}).items():
            if name == "vary":
                headers.add_vary_header(value)
            else:
                headers.setdefault(name, value)
