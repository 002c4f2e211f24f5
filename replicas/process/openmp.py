"""How torch's OpenMP threads wait between two operations. Free of torch, which reads the environment once, when it loads."""

from __future__ import annotations

from collections.abc import MutableMapping

SPIN_COUNT = "1000"
"""Rounds that a thread of GNU's OpenMP looks for work before it sleeps, some microseconds."""


def limit_spinning(variables: MutableMapping[str, str]) -> None:
    """Sets GOMP_SPINCOUNT in `variables`, which must happen before torch is imported; what the user has set stays.

    By default these threads look for work for milliseconds before they sleep. Beside another busy process they keep the core from the
    thread that they wait for: an engine that computes with torch's operations then makes 1 to 2 tokens/s instead of half its speed.
    """
    if "OMP_WAIT_POLICY" not in variables:
        variables.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
