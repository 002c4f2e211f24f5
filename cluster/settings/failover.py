"""How long a request is kept alive when replicas or the router die."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverPolicy:
    """Limits on the losses and waits of one request."""

    max_deaths: int = 3
    """A choice that was present at this many deaths of replicas fails. Before the last attempt it gets a replica of its own, so
    that it fails only when it is the cause."""
    router_timeout_s: float = 10.0
    """How long a request waits for a dead router to restart."""
    replica_timeout_s: float = 120.0
    """How long a started choice whose replica died waits for another replica, e.g. for the restart of the only one."""
