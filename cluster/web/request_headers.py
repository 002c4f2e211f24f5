"""Headers of a generation: priority, targets, trace."""

from __future__ import annotations

from starlette.datastructures import Headers

from cluster.failures import BadRequest
from cluster.generation.request_context import RequestContext
from cluster.principal import Principal
from cluster.settings.priorities import MAX_PRIORITY
from cluster.web.trace_headers import trace_context_of

TTFT_HEADER = "X-TTFT-Target-Ms"
TPOT_HEADER = "X-TPOT-Target-Ms"
_MAX_TARGET_MS = 86_400_000


def context_of(headers: Headers, principal: Principal, *, priority_header: str, arrival_s: float) -> RequestContext:
    """Raises BadRequest naming the header that is wrong."""
    return RequestContext(
        principal=principal,
        arrival_s=arrival_s,
        asked_priority=_asked_priority(headers, priority_header),
        asked_ttft_s=_asked_target_s(headers, TTFT_HEADER),
        asked_tpot_s=_asked_target_s(headers, TPOT_HEADER),
        trace_context=trace_context_of(headers),
    )


def _asked_priority(headers: Headers, name: str) -> int | None:
    """None without such a header. Raises BadRequest."""
    value = headers.get(name)
    if value is None:
        return None
    text = value.strip()
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= len(str(MAX_PRIORITY)) and int(digits) <= MAX_PRIORITY):
        raise _bad_header(name, f"must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}", text)
    return int(text)


def _asked_target_s(headers: Headers, name: str) -> float | None:
    """Seconds; None without such a header. Raises BadRequest."""
    value = headers.get(name)
    if value is None:
        return None
    text = value.strip()
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(_MAX_TARGET_MS))
    if not is_number or not 1 <= int(text) <= _MAX_TARGET_MS:
        raise _bad_header(name, f"must be whole milliseconds from 1 to {_MAX_TARGET_MS}", text)
    return int(text) / 1000


def _bad_header(name: str, expected: str, text: str) -> BadRequest:
    return BadRequest(f"Invalid value for header '{name}': {expected}, got {text[:40]!r}.", param=name, code="invalid_value")
