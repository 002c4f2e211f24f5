"""Checks before anything is started. Each failure is one line: what is wrong and what to do."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Collection
from pathlib import Path

import psutil

NEEDED_BYTES = 1_000_000_000
"""For Ray's logs and the object store's spill, beside what the default model checks for itself."""


class LaunchError(Exception):
    """The cluster cannot be brought up; the message is shown as it is and names the fix."""


def check_disk(folder: Path, needed_bytes: int = NEEDED_BYTES) -> None:
    """Raises LaunchError when the file system of `folder` is nearly full."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise LaunchError(
            f"only {free >> 20} MiB are free at {existing}: free {needed_bytes >> 20} MiB, or set MANTA_STATE_DIR to another disk"
        )


def check_http_port(port: int, own_pids: Collection[int]) -> None:
    """Raises LaunchError when somebody else listens on `port`."""
    if is_listening(port) and not (owner := port_owner(port)).is_one_of(own_pids):
        raise LaunchError(f"port {port} is taken by {owner}: stop it, or choose another with: make serve PORT={port + 1}")


def check_no_other_ray(ports: Collection[int], own_pids: Collection[int]) -> None:
    """Raises LaunchError when a Ray that `make serve` did not start holds one of Ray's ports."""
    for port in ports:
        if is_listening(port) and not (owner := port_owner(port)).is_one_of(own_pids):
            raise LaunchError(
                f"port {port}, which Ray needs, is taken by {owner}: if that is another Ray, stop it with `ray stop`, "
                "or start it with PYTHONPATH set to this folder and deploy onto it with `serve deploy ray_config.yaml`"
            )


def is_listening(port: int) -> bool:
    """Whether anything accepts connections on this machine's loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class PortOwner:
    """Who listens on a port, as far as the operating system lets us see."""

    def __init__(self, process: psutil.Process | None) -> None:
        self._process = process

    def is_one_of(self, pids: Collection[int]) -> bool:
        return self._process is not None and self._process.pid in pids

    def __str__(self) -> str:
        if self._process is None:
            return "a process of another user"
        try:
            return f"{self._process.name()} (pid {self._process.pid})"
        except psutil.Error:
            return f"pid {self._process.pid}"


def port_owner(port: int) -> PortOwner:
    """The process that listens on `port`, if it may be known."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:  # macOS shows other users' sockets to root only
        return PortOwner(None)
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid is not None:
            try:
                return PortOwner(psutil.Process(connection.pid))
            except psutil.NoSuchProcess:
                continue
    return PortOwner(None)
