"""Finds the processes of ranks, which tests kill and stop."""

from __future__ import annotations

import psutil


def rank_pids(of: int | None = None) -> list[int]:
    """Processes of ranks above 0 whose parent is this process, or `of`; those that ended but were not waited for do not count."""
    try:
        children = psutil.Process(of).children()
    except psutil.NoSuchProcess:
        return []
    return [c.pid for c in children if c.status() != psutil.STATUS_ZOMBIE and "replicas.ranks.rank_process" in c.cmdline()]
