"""One server-sent event (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_LINE_SEPARATORS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Those of Unicode that JSON leaves as they are. Lines of events end at CR and LF alone, but some clients split at these too."""


def json_event(data: Mapping[str, Any], name: str = "") -> bytes:
    """JSON escapes line breaks, so that one line always holds the data, by any rule of what a line is."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for separator, escaped in _LINE_SEPARATORS.items():
        text = text.replace(separator, escaped)
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {text}\n\n".encode()
