"""How hard a request is kept alive when replicas and routers die."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverPolicy:
    """How hard a request is kept alive."""

    max_deaths: int = 3
    """A choice present at this many deaths of replicas is refused. Before the last of them it runs alone on a replica, so
    that it is refused only when it is the reason."""
    router_timeout_s: float = 10.0
    """How long a request waits for a dead router to come back."""
    replica_timeout_s: float = 120.0
    """How long a begun choice whose replica died waits for another one to be up, e.g. for the only one to be restarted."""
