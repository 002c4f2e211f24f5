"""Collectives between a replica's ranks inside a forward pass, over a process group of their own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

_dist: Any = dist  # the names used here are public, but not in the type stubs

CollectiveBackend = Literal["gloo", "nccl"]


class RankGroup(Protocol):
    """The ranks of one replica, seen from one of them. All ranks make the same calls in the same order."""

    rank: int
    size: int

    def all_reduce(self, data: Tensor) -> Tensor:
        """Adds up `data` over the ranks, in place; returns it."""
        ...

    def gather_last(self, part: Tensor) -> Tensor | None:
        """On rank 0: the parts of all ranks concatenated along the last axis, in rank order; None elsewhere. Widths may differ."""
        ...

    def least(self, value: int) -> int:
        """The smallest value that any rank gives."""
        ...


class Alone:
    """A replica of one rank: every collective is the identity."""

    rank, size = 0, 1

    def all_reduce(self, data: Tensor) -> Tensor:
        return data

    def gather_last(self, part: Tensor) -> Tensor | None:
        return part

    def least(self, value: int) -> int:
        return value


class ProcessGroup:
    """Owns a group of Gloo or NCCL, independent of every other group of the process.

    After a rank has died every call raises RuntimeError, at once or at the deadline; the group cannot be used again.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        backend: CollectiveBackend,
        device: torch.device,
        host: str,
        deadline_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Returns when all ranks have joined. `host` is this rank's own address. Raises RuntimeError at the deadline."""
        self.rank, self.size, self._device, self._clock = rank, size, device, clock
        self.seconds = 0.0
        """Time spent in calls so far; on CUDA only the time to queue them."""
        deadline = timedelta(seconds=deadline_s)
        if backend == "nccl":
            options = _dist.ProcessGroupNCCL.Options()
            options._timeout = deadline
            torch.cuda.set_device(device)
            self._group = _dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            options = _dist.ProcessGroupGloo._Options()
            options._timeout = deadline
            options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
            self._group = _dist.ProcessGroupGloo(store, rank, size, options)
        self._widths: list[int] | None = None  # widths of the gathered parts, by rank; the same in every step
        self.least(0)  # NCCL connects in its first call, and errors should show at start

    def set_deadline(self, deadline_s: float) -> None:
        """Sets the deadline of every later call."""
        self._group._set_default_timeout(timedelta(seconds=deadline_s))

    def all_reduce(self, data: Tensor) -> Tensor:
        start_s = self._clock()
        self._group.allreduce([data]).wait()
        self.seconds += self._clock() - start_s
        return data

    def gather_last(self, part: Tensor) -> Tensor | None:
        start_s = self._clock()
        if self._widths is None:
            widths = torch.zeros(self.size, dtype=torch.int64, device=self._device)
            widths[self.rank] = part.shape[-1]
            self._group.allreduce([widths]).wait()
            self._widths = widths.tolist()
        whole = None
        if self.rank == 0:
            parts = [part, *(part.new_empty(*part.shape[:-1], width) for width in self._widths[1:])]
            for peer in range(1, self.size):
                self._group.recv([parts[peer]], peer, 0).wait()
            whole = torch.cat(parts, dim=-1)
        else:
            self._group.send([part.contiguous()], 0, 0).wait()
        self.seconds += self._clock() - start_s
        return whole

    def least(self, value: int) -> int:
        data = torch.tensor([value], dtype=torch.int64, device=self._device)
        options = _dist.AllreduceOptions()
        options.reduceOp = _dist.ReduceOp.MIN
        self._group.allreduce([data], options).wait()
        return int(data.item())

    def close(self) -> None:
        """Over NCCL this also ends a wait in another thread; over Gloo such a wait ends at the deadline or when the peer closes."""
        try:
            self._group.abort()
        except RuntimeError as error:
            logger.debug("the ranks' process group was broken already: %s", error)
