"""Which cores each engine of a machine computes on: their number, and an exclusive set. Free of torch; Linux only.

Loops wait for their slowest thread, so two engines that share a core each run at less than half speed. Each engine therefore claims
cores that no other engine holds and keeps its threads on them.
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
    """Cores that all engines of an application want together."""

    num_threads: int = 0
    """Sum over the engines that configure a number."""
    num_sharing: int = 0
    """Engines that take an equal share of the remaining cores."""

    @classmethod
    def of(cls, engines: Iterable[tuple[int, int | None]]) -> Self:
        """From pairs (number of equal engines, threads of each or None)."""
        pairs = list(engines)
        return cls(
            num_threads=sum(num * threads for num, threads in pairs if threads is not None),
            num_sharing=sum(num for num, threads in pairs if threads is None),
        )


def threads_of_engine(wanted: int | None, demand: CoreDemand, *, num_cores: int, num_machines: int = 1) -> int:
    """Threads of one engine, `wanted` or an equal share, if the demand is spread evenly over machines of `num_cores`.

    Raises ValueError if the engines together would have more threads than cores although some could have fewer. More engines
    than cores, with one thread each, only get a warning.
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
    """Cores that no other claim on this machine holds. Released by `close`, or by the kernel when the process ends.

    A claim is the name of an abstract Unix socket per core. Such a name belongs to one process and vanishes with it, so a killed
    engine leaves nothing to clean up. Claims in another network namespace (container) are not seen: give each its own cpuset.
    """

    def __init__(self, cores: Sequence[int], held: Sequence[socket.socket]) -> None:
        self.cores = tuple(cores)
        self._held = held

    def pin_thread(self) -> None:
        """Keeps the calling thread, and every thread that it starts later, on these cores."""
        os.sched_setaffinity(0, self.cores)

    def close(self) -> None:
        for one in self._held:
            one.close()


def try_claim_cores(num_cores: int, candidates: Sequence[int] | None = None, namespace: str = "manta-core") -> CoreClaim | None:
    """Claims `num_cores` of the cores that this process may use, in the order of `neighbouring_cores`; None if too few are free.

    Concurrent claims that fit together all succeed, because each only skips cores that another claim holds.
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
    """Cores sorted by package and physical core: hardware threads of one core are adjacent, so that two engines do not share it."""

    def place(core: int) -> tuple[int, int, int]:
        folder = topology / f"cpu{core}" / "topology"
        try:
            return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text()), core
        except (OSError, ValueError):  # not every container shows it
            return 0, core, core

    return sorted(cores, key=place)
