"""CPU quotas of cgroups, with the files that the kernel's documentation describes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from replicas.process.cpu_quota import cpu_quota, num_usable_cores

V2 = "30 23 0:26 {group} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "33 25 0:29 {group} /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:13 - cgroup cgroup rw,cpu,cpuacct\n"
V1_MEMORY = "34 25 0:30 / /sys/fs/cgroup/memory rw shared:14 - cgroup cgroup rw,memory\n"
DISK = "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"


class FakeRoot:
    """A root folder with `/proc/self` and cgroup files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, text: str) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def mount(self, *lines: str, groups: str) -> None:
        self.write("proc/self/mountinfo", DISK + "".join(lines))
        self.write("proc/self/cgroup", groups)


@pytest.fixture
def fake(tmp_path: Path) -> FakeRoot:
    return FakeRoot(tmp_path)


def test_quota_of_v2_is_the_smallest_up_to_the_root(fake: FakeRoot) -> None:
    fake.mount(V2.format(group="/"), groups="0::/pod/engine\n")
    fake.write("sys/fs/cgroup/pod/engine/cpu.max", "300000 100000\n")
    fake.write("sys/fs/cgroup/pod/cpu.max", "150000 100000\n")
    assert cpu_quota(fake.path) == 1.5
    fake.write("sys/fs/cgroup/pod/cpu.max", "max 100000\n")
    assert cpu_quota(fake.path) == 3.0


def test_quota_of_v1_is_that_of_the_cpu_hierarchy(fake: FakeRoot) -> None:
    fake.mount(V1_MEMORY, V1.format(group="/"), groups="4:memory:/elsewhere\n3:cpu,cpuacct:/pod\n0::/\n")
    fake.write("sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_quota_us", "50000\n")
    fake.write("sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_period_us", "20000\n")
    fake.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    fake.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    fake.write("sys/fs/cgroup/memory/elsewhere/cpu.cfs_quota_us", "1\n")
    assert cpu_quota(fake.path) == 2.5


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/inner"])
def test_container_that_sees_only_its_own_cgroup_finds_its_quota(fake: FakeRoot, path: str) -> None:
    """Without a cgroup namespace the path is that of the host, and the mount shows what lies below /docker/abc."""
    fake.mount(V1.format(group="/docker/abc"), groups=f"3:cpu,cpuacct:{path}\n")
    fake.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "200000\n")
    fake.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    fake.write("sys/fs/cgroup/cpu,cpuacct/inner/cpu.cfs_quota_us", "-1\n")
    assert cpu_quota(fake.path) == 2.0


def test_no_quota_where_none_is_set_or_nothing_is_mounted(fake: FakeRoot) -> None:
    assert cpu_quota(fake.path) is None
    fake.mount(V2.format(group="/"), groups="0::/pod\n")
    assert cpu_quota(fake.path) is None
    fake.write("sys/fs/cgroup/pod/cpu.max", "max 100000\n")
    assert cpu_quota(fake.path) is None


@pytest.mark.parametrize(
    ("quota", "expected"), [("max", 4), ("10000", 1), ("140000", 1), ("150000", 2), ("249000", 2), ("300000", 3), ("900000", 4)]
)
def test_usable_cores_are_the_quota_rounded_within_the_mask(
    fake: FakeRoot, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 4, 6})
    fake.mount(V2.format(group="/"), groups="0::/pod\n")
    fake.write("sys/fs/cgroup/pod/cpu.max", f"{quota} 100000\n")
    assert num_usable_cores(fake.path) == expected
