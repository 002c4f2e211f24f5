"""How many cores this process may keep busy: its CPU mask, and the CPU quota of its cgroups. Free of torch; Linux only."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

MOUNTED_ROOT = Path("/")


def num_usable_cores(root: Path = MOUNTED_ROOT) -> int:
    """Cores of this process's mask, but no more than its quota rounded to the nearest whole number, at least 1.

    Threads beyond a quota do not compute more: the kernel stops all threads of the cgroup for the rest of each period. With half a core or
    more to spare, another thread still pays.
    """
    num_cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return num_cores if quota is None else max(1, min(num_cores, math.floor(quota + 0.5)))


def cpu_quota(root: Path = MOUNTED_ROOT) -> float | None:
    """CPUs that this process's cgroups allow it, the smallest on the way to their root; None without a quota.

    Reads cgroup v2 (`cpu.max`) and v1 (`cpu.cfs_quota_us`), whichever is mounted (Linux, Documentation/admin-guide/cgroup-v2.rst and
    scheduler/sched-bwc.rst). `root` is where `/proc` and the mount points are looked up.
    """
    quotas = [quota for folder in _cgroup_folders(root) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """The folders of the cgroups that limit this process's CPUs, in all mounted hierarchies."""
    groups = _groups_by_controller(root)
    for mounted_group, mount_point, controllers in _cgroup_mounts(root):
        group = next((groups[name] for name in controllers if name in groups), None)
        if group is None:
            continue
        # Inside a container its own cgroup is often what is mounted, and the path beside it that of the host.
        below = group.removeprefix(mounted_group.rstrip("/")) if group.startswith(mounted_group) else ""
        top = root / mount_point.lstrip("/")
        folder = top / below.lstrip("/")
        while folder != top:
            yield folder
            folder = folder.parent
        yield top


def _groups_by_controller(root: Path) -> dict[str, str]:
    """controller -> path of this process's cgroup; the controller of v2 is "". Lines of /proc/self/cgroup are `id:controllers:path`."""
    groups: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _cgroup_mounts(root: Path) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Mounted cgroup, mount point and controllers of each hierarchy that can have a CPU quota, from /proc/self/mountinfo."""
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        _, _, _, mounted_group, mount_point = mount.split(" ")[:5]
        if kind == "cgroup2":
            yield mounted_group, mount_point, ("",)
        elif kind == "cgroup" and "cpu" in options.split(","):
            yield mounted_group, mount_point, ("cpu",)


def _quota_of(folder: Path) -> float | None:
    """CPUs that one cgroup allows; None if it sets no limit, or if it does not exist."""
    v2 = _lines(folder / "cpu.max")
    v1 = [*_lines(folder / "cpu.cfs_quota_us"), *_lines(folder / "cpu.cfs_period_us")]
    values = v2[0].split() if v2 else v1
    if len(values) != 2 or values[0] in ("max", "-1"):
        return None
    return int(values[0]) / int(values[1])


def _lines(path: Path) -> list[str]:
    """No lines for a file that does not exist or may not be read: then no limit is known."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
