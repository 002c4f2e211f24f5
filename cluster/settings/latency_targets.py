"""Latency targets for the requests of a model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.settings.priorities import MAX_PRIORITY


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTarget:
    """One entry of `models[].targets`. It applies to requests of its priority, and to less urgent ones up to the next entry."""

    priority: int = 0
    """Smaller is more urgent. Requests more urgent than the first entry have no target."""
    ttft_s: float | None = None
    """Time from arrival to the first token; the router orders waiting requests and scores replicas by it. None: goodput
    has no such limit, and the router assumes `router.default_ttft_slo_s`."""
    tpot_s: float | None = None
    """Mean time per token of a choice after its first one; goodput is counted against it. None: no target."""

    def __post_init__(self) -> None:
        if abs(self.priority) > MAX_PRIORITY:
            raise ValueError(f"priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, got {self.priority}")
        if self.ttft_s is None and self.tpot_s is None:
            raise ValueError("ttft_s or tpot_s must be set")
        for name, value in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be above 0, got {value}")

    def lowered(self, ttft_s: float | None, tpot_s: float | None) -> LatencyTarget:
        """The target with the client's values where they are stricter. A value that is None here stays None."""
        return replace(self, ttft_s=_stricter(self.ttft_s, ttft_s), tpot_s=_stricter(self.tpot_s, tpot_s))


def target_for(targets: Sequence[LatencyTarget], priority: int) -> LatencyTarget | None:
    """The entry that applies to `priority`, or None; `targets` are in ascending order of priority."""
    return next((target for target in reversed(targets) if target.priority <= priority), None)


def check_targets(targets: Sequence[LatencyTarget]) -> None:
    """Raises ValueError unless the priorities are strictly ascending."""
    priorities = [target.priority for target in targets]
    if any(later <= earlier for earlier, later in itertools.pairwise(priorities)):
        raise ValueError(f"targets must be in ascending order of different priorities, got {', '.join(map(str, priorities))}")


def _stricter(target_s: float | None, asked_s: float | None) -> float | None:
    return target_s if target_s is None or asked_s is None else min(target_s, asked_s)
