"""The trace that a request belongs to, by the headers of W3C Trace Context (https://www.w3.org/TR/trace-context-1/)."""

from __future__ import annotations

import re

from starlette.datastructures import Headers

from replicas.request import TraceContext

# Later versions may say more behind the flags.
_TRACEPARENT = re.compile(r"(?P<version>[0-9a-f]{2})-(?P<trace_id>[0-9a-f]{32})-(?P<parent_id>[0-9a-f]{16})-[0-9a-f]{2}(?P<more>-[!-~]*)?")
_MEMBER = re.compile(r"[a-z0-9][a-z0-9_*/@-]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~]")  # the value has no comma and no equals sign
_MAX_MEMBERS = 32
_MAX_CHARS = 512
"""Length of either header that everybody has to pass on."""


def trace_context_of(headers: Headers) -> TraceContext:
    """As the standard demands, a malformed `traceparent` is as none, and a malformed `tracestate` is dropped alone: neither is a reason
    to refuse a request."""
    traceparent = ",".join(headers.getlist("traceparent")).strip()
    if not _is_traceparent(traceparent):
        return TraceContext()
    tracestate = ",".join(headers.getlist("tracestate")).strip()
    return TraceContext(traceparent, tracestate if _is_tracestate(tracestate) else "")


def _is_traceparent(text: str) -> bool:
    found = _TRACEPARENT.fullmatch(text)
    if found is None or len(text) > _MAX_CHARS or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return False
    return bool(found["trace_id"].strip("0") and found["parent_id"].strip("0"))


def _is_tracestate(text: str) -> bool:
    members = [member for part in text.split(",") if (member := part.strip(" \t"))]
    return len(text) <= _MAX_CHARS and len(members) <= _MAX_MEMBERS and all(_MEMBER.fullmatch(member) for member in members)
