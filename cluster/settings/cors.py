"""Which web pages may call the API from a browser."""

from __future__ import annotations

import re
from dataclasses import dataclass

ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._\[\]:-]+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorsRules:
    """Cross-origin resource sharing (https://fetch.spec.whatwg.org/#http-cors-protocol); off unless origins are named."""

    origins: tuple[str, ...] = ()
    """Origins of pages as browsers send them, e.g. ["https://chat.example.com", "http://localhost:3000"], or ["*"] for all."""
    max_age_s: int = 600
    """How long a browser may remember that it was allowed."""

    def __post_init__(self) -> None:
        for origin in self.origins:
            if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"origins must be like https://chat.example.com or http://localhost:3000 (no path, lower case) or *, got {origin!r}"
                )
        if self.max_age_s < 0:
            raise ValueError(f"max_age_s must be at least 0, got {self.max_age_s}")
