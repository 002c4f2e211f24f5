"""Which cores each engine of a machine computes on: how many, and a set of its own. Free of torch; Linux.

OpenMP waits at a barrier for its slowest thread, so two engines on one core cost each other far more than half. Every engine
therefore claims cores that no other engine holds and keeps its threads on them.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

logger = logging.getLogger(__name__)

TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreDemand:
    """What all engines of an application want of their machines' cores."""

    num_threads: int = 0
    """Sum over the engines that name a number."""
    num_sharing: int = 0
    """Engines that take an equal share of what is left."""

    @classmethod
    def of(cls, engines: Iterable[tuple[int, int | None]]) -> Self:
        """From (number of such engines, threads of each or None)."""
        pairs = list(engines)
        return cls(
            num_threads=sum(num * threads for num, threads in pairs if threads is not None),
            num_sharing=sum(num for num, threads in pairs if threads is None),
        )


def threads_of_engine(wanted: int | None, demand: CoreDemand, *, num_cores: int, num_machines: int = 1) -> int:
    """Threads of one engine that wants `wanted` or a share, when the demand is spread evenly over machines of `num_cores`.

    Raises ValueError when the engines together would have more threads than cores though some could have fewer. More engines
    than cores, of one thread each, are only warned of.
    """
    named = -(-demand.num_threads // num_machines)
    sharing = -(-demand.num_sharing // num_machines)
    threads = wanted if wanted is not None else max(1, (num_cores - named) // max(1, sharing))
    together = named + sharing * (1 if wanted is not None else threads)
    if together > num_cores and threads > 1:
        raise ValueError(
            f"num_threads {threads}: the engines on one machine would have {together} threads for {num_cores} cores; "
            "lower num_threads or num_replicas"
        )
    if together > num_cores:
        logger.warning("%d engine threads on a machine with %d cores: replicas will slow each other down", together, num_cores)
    return threads


class CoreClaim:
    """Cores that no other claim on this machine holds. Given back by `close`, and by the kernel when the process ends.

    The name of an abstract Unix socket belongs to one process at a time and vanishes with it, so a killed engine leaves nothing
    to clean up. Processes in another network namespace (another container) are not seen: give each its own cpuset.
    """

    def __init__(self, cores: Sequence[int], held: Sequence[socket.socket]) -> None:
        self.cores = tuple(cores)
        self._held = held

    def pin_thread(self) -> None:
        """Keeps the calling thread, and every thread that it starts from now on, on these cores."""
        os.sched_setaffinity(0, self.cores)

    def close(self) -> None:
        for one in self._held:
            one.close()


def try_claim_cores(num_cores: int, candidates: Sequence[int] | None = None, namespace: str = "manta-core") -> CoreClaim | None:
    """`num_cores` of the cores that this process may use, in the order of `neighbouring_cores`; None when too few are free.

    Concurrent claims that fit together all succeed, because each only passes over cores that another one keeps.
    """
    cores: list[int] = []
    held: list[socket.socket] = []
    for core in neighbouring_cores(os.sched_getaffinity(0)) if candidates is None else candidates:
        if len(cores) == num_cores:
            break
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0{namespace}-{core}")
        except OSError:  # the name is taken
            name.close()
        else:
            cores.append(core)
            held.append(name)
    claim = CoreClaim(cores, held)
    if len(cores) == num_cores:
        return claim
    claim.close()
    return None


def neighbouring_cores(cores: Iterable[int], topology: Path = TOPOLOGY) -> list[int]:
    """Sorted by package and physical core, so that the threads of one core follow each other and no two engines share it."""

    def place(core: int) -> tuple[int, int, int]:
        folder = topology / f"cpu{core}" / "topology"
        try:
            return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text()), core
        except (OSError, ValueError):  # not every container shows it
            return 0, core, core

    return sorted(cores, key=place)
