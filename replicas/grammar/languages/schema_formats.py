"""Formats of JSON Schema that are exact only as patterns of ours (RFC 3339, section 5.6)."""

from __future__ import annotations

import json
from typing import Any

from replicas.grammar.languages.json_schema import subschemas

_LEAP = "0[48]|[2468][048]|[13579][26]"
_YEAR = "000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3}"
_DAY = (
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"  # months of 31 days
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8])"
)
_DATE = f"(?:(?:{_YEAR})-(?:{_DAY})|(?:[0-9]{{2}}(?:{_LEAP})|(?:{_LEAP})00)-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}
"""Days of the real calendar from year 1, without leap seconds: what every library of dates can read. llguidance has 29 February in every
year, and a 60th second in every minute."""


def with_exact_formats(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` itself, or a copy in which `PATTERNS` stand for their formats. Strings with a pattern must match both."""
    text = json.dumps(schema)
    if not any(f'"{name}"' in text for name in PATTERNS):
        return schema
    copy: dict[str, Any] = json.loads(text)
    for _, part in subschemas(copy, with_definitions=True):
        name = part.get("format")
        if isinstance(name, str) and name in PATTERNS:
            del part["format"]
            if "pattern" not in part:
                part["pattern"] = PATTERNS[name]
            elif isinstance(part.get("allOf", []), list):
                part["allOf"] = [*part.get("allOf", ()), {"pattern": PATTERNS[name]}]
    return copy
