"""Counts of drafts by proposer. Free of torch."""

from __future__ import annotations

from replicas.stats import DraftStats


class DraftCounts:
    """Owns the counts, which only grow."""

    def __init__(self) -> None:
        self._passes: dict[str, int] = {}
        self._drafted: dict[str, int] = {}
        self._accepted: dict[str, list[int]] = {}  # proposer -> accepted drafts by depth

    def note(self, name: str, num_drafts: int, num_accepted: int) -> None:
        self._passes[name] = self._passes.get(name, 0) + 1
        self._drafted[name] = self._drafted.get(name, 0) + num_drafts
        accepted = self._accepted.setdefault(name, [])
        accepted += [0] * (num_accepted - len(accepted))
        for depth in range(num_accepted):
            accepted[depth] += 1

    def snapshot(self) -> tuple[DraftStats, ...]:
        return tuple(
            DraftStats(
                method=name,
                num_passes=num_passes,
                num_drafted=self._drafted[name],
                num_accepted=sum(self._accepted[name]),
                accepted_by_depth=tuple(self._accepted[name]),
            )
            for name, num_passes in self._passes.items()
        )
