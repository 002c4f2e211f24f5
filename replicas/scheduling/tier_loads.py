"""The load of an engine by priority."""

from __future__ import annotations

from collections.abc import Iterable

from replicas.scheduling.request_state import RequestState
from replicas.stats import TierLoad

MAX_TIERS = 8


def tier_loads(running: Iterable[RequestState], waiting: Iterable[RequestState]) -> tuple[TierLoad, ...]:
    """One entry per priority, the most urgent first. Clients choose priorities, so the least urgent ones share the last of MAX_TIERS
    entries, under the most urgent priority among them. KV that other replicas compute counts as computed."""
    loads: dict[int, list[int]] = {}  # priority -> the other fields of TierLoad
    for state in running:
        load = loads.setdefault(state.request.priority, [0, 0, 0, 0])
        load[0] += 1
        load[3] += state.num_computed_tokens
        if not (state.is_decoding or state.is_held):
            load[2] += state.num_uncomputed_tokens
    for state in waiting:
        load = loads.setdefault(state.request.priority, [0, 0, 0, 0])
        load[1] += 1
        if not state.awaits_load:
            load[2] += state.num_uncomputed_tokens
    ordered = sorted(loads.items())
    rest = ordered[MAX_TIERS - 1 :]
    if len(rest) > 1:
        ordered[MAX_TIERS - 1 :] = [(rest[0][0], [sum(values) for values in zip(*(load for _, load in rest), strict=True)])]
    return tuple(TierLoad(priority, *load) for priority, load in ordered)
