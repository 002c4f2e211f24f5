"""Links as torch.distributed process groups of two, made when a pair first connects and independent of every other group."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kvcache.transfer.link import LinkLost

logger = logging.getLogger(__name__)

_dist: Any = dist  # the names used here are public, but not in the type stubs

SOURCE_RANK, TARGET_RANK = 0, 1


class ProcessGroupLink:
    """Owns one group. Messages arrive in order; Gloo notices a dead peer within milliseconds."""

    def __init__(self, group: Any, peer: int, device: torch.device) -> None:
        self._group, self._peer, self._device = group, peer, device

    def announce(self, data: torch.Tensor) -> str:
        return ""

    def send(self, data: torch.Tensor) -> None:
        try:
            self._group.send([data.to(self._device).view(torch.uint8)], self._peer, 0).wait()
            self._synchronize()
        except RuntimeError as error:
            raise LinkLost(f"the process group broke in a send: {error}") from error

    def settle(self) -> None:
        """Does nothing: a send returns only after its message was received."""

    def receive(self, ticket: str, num_bytes: int) -> torch.Tensor:
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        try:
            self._group.recv([data], self._peer, 0).wait()
            self._synchronize()
        except RuntimeError as error:
            raise LinkLost(f"the process group broke in a receive: {error}") from error
        return data

    def close(self) -> None:
        """Also ends a wait in another thread."""
        try:
            self._group.abort()
        except RuntimeError as error:
            logger.debug("a process group was broken already: %s", error)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class ProcessGroupTransport:
    """Owns the rendezvous store of the sources in this process. Groups use NCCL for blocks on a CUDA device, else Gloo."""

    name = "process-group"

    def __init__(self, device: torch.device, host: str = "127.0.0.1", deadline_s: float = 10.0) -> None:
        if device.type == "cuda" and not dist.is_nccl_available():
            raise ValueError("device is cuda, but this torch has no NCCL; allowed without it: cpu")
        self._device = device
        self._host = host
        self._deadline = timedelta(seconds=deadline_s)
        self._store: Any = None  # made by the first invitation: receivers need none
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def invite(self) -> dict[str, Any]:
        with self._lock:
            if self._store is None:
                # By default the store would listen on every address of the machine.
                with socket.create_server((self._host, 0)) as listener:
                    port = listener.getsockname()[1]
                    self._store = _dist.TCPStore(
                        self._host, port, is_master=True, wait_for_workers=False, timeout=self._deadline, master_listen_fd=listener.detach()
                    )
        return {"host": self._host, "port": self._store.port, "link": f"{os.getpid()}-{next(self._numbers)}"}

    def accept(self, invitation: dict[str, Any]) -> ProcessGroupLink:
        return self._link(invitation, SOURCE_RANK)

    def join(self, invitation: dict[str, Any]) -> ProcessGroupLink:
        return self._link(invitation, TARGET_RANK)

    def _link(self, invitation: dict[str, Any], rank: int) -> ProcessGroupLink:
        """Each link has its own client of the store: a client serves one wait at a time, so on a shared client a peer that
        never joins would block all others."""
        name = invitation["link"]
        try:
            store = _dist.TCPStore(invitation["host"], invitation["port"], is_master=False, timeout=self._deadline)
        except RuntimeError as error:
            raise LinkLost(f"the store of a process group cannot be reached: {error}") from error
        prefixed = _dist.PrefixStore(name, store)
        try:
            group = self._nccl(prefixed, rank) if self._device.type == "cuda" else self._gloo(prefixed, rank)
        except RuntimeError as error:
            raise LinkLost(f"the peer did not come to process group {name}: {error}") from error
        return ProcessGroupLink(group, 1 - rank, self._device)

    def _gloo(self, store: Any, rank: int) -> Any:
        options = _dist.ProcessGroupGloo._Options()
        options._timeout = self._deadline
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=self._host)]
        return _dist.ProcessGroupGloo(store, rank, 2, options)

    def _nccl(self, store: Any, rank: int) -> Any:
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = self._deadline
        torch.cuda.set_device(self._device)
        return _dist.ProcessGroupNCCL(store, rank, 2, options)
