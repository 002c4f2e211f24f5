"""One server-sent event (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def json_event(data: Mapping[str, Any], name: str = "") -> bytes:
    """JSON escapes line breaks, so that one line always holds the data."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
