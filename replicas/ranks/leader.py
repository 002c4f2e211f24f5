"""Rank 0 of a replica with several ranks: starts the others and sends them its steps."""

from __future__ import annotations

import logging
import socket
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from replicas.attention.step_tensors import StepTensors
from replicas.engine_config import EngineConfig
from replicas.model.loader import ModelChoice
from replicas.model.runner import ModelRunner, StepResult
from replicas.process.cpu_quota import num_usable_cores
from replicas.ranks.launcher import RankLauncher
from replicas.ranks.rank_transfers import RankTransfers
from replicas.ranks.ranks import Ranks, RankStartError
from replicas.ranks.step_message import encode_step
from replicas.sharding.collectives import CollectiveBackend, ProcessGroup
from replicas.sharding.empty_model import build_empty
from replicas.sharding.sharding import ShardingPlan

logger = logging.getLogger(__name__)

_dist: Any = dist  # the names used here are public, but not in the type stubs


class Leader:
    """Owns the other ranks, which end with it, and rank 0's end of their process group. `transfers` is their part in handoffs."""

    def __init__(self, config: EngineConfig, choice: ModelChoice, launcher: RankLauncher) -> None:
        """Starts the ranks, which load at the same time as rank 0. Raises UnsupportedModel or ValueError, before anything starts, for
        a model that cannot be divided, and RankStartError if a rank does not start."""
        size = config.tensor_parallel_size
        model, _ = build_empty(choice.hf_config, choice.source, choice.dtype, choice.trust_remote_code)
        ShardingPlan.of(model, size)
        backend = _backend(config, choice.device, launcher)
        deadline_s = config.parallel.init_deadline_s
        self._ranks = Ranks(
            launcher,
            size,
            init_deadline_s=deadline_s,
            rank_deadline_s=config.parallel.rank_deadline_s,
            num_threads=config.num_threads or 1,
        )
        self.transfers = RankTransfers(self._ranks)
        self._group: ProcessGroup | None = None
        try:
            self._store = _store(self._ranks.host, deadline_s)
            self._ranks.set_up(
                {
                    "config": asdict(_decided(config, choice)),
                    "backend": backend,
                    "store_port": self._store.port,
                    "log_level": logging.getLogger("replicas").getEffectiveLevel(),
                }
            )
            self._group = ProcessGroup(
                self._store, 0, size, backend=backend, device=choice.device, host=self._ranks.host, deadline_s=deadline_s
            )
        except RuntimeError as error:
            lost = self._ranks.lost_because(error)
            self.close()
            raise RankStartError(f"tensor_parallel_size {size}: the ranks' {backend} group did not form: {lost}") from error
        except BaseException:
            self.close()
            raise
        self._ranks.when_lost(self._group.close)
        self._deadline_s = config.parallel.rank_deadline_s

    @property
    def group(self) -> ProcessGroup:
        assert self._group is not None
        return self._group

    @property
    def message_seconds(self) -> float:
        return self._ranks.message_seconds

    def lead(self, runner: ModelRunner) -> ModelRunner:
        """Waits until all ranks have loaded; returns a runner that sends each step to them and runs it on `runner`. Raises
        RankStartError."""
        for rank, text in self._ranks.wait_ready().items():
            logger.info("rank %d: %s", rank, text)
        self.group.set_deadline(self._deadline_s)
        return _LeadingRunner(runner, self._ranks)

    def check(self) -> None:
        """Raises RankLost once a rank is lost. Callable from any thread."""
        self._ranks.check()

    def explain(self, error: BaseException) -> RankStartError:
        """Why loading failed with `error`: another rank's reason, if there is one."""
        return RankStartError(f"tensor_parallel_size {self._ranks.size}: {self._ranks.lost_because(error)}")

    def close(self) -> None:
        """Ends all ranks; returns when no process is left."""
        self._ranks.close()
        if self._group is not None:
            self._group.close()


class _LeadingRunner:
    """Sends each step to the other ranks, then runs rank 0's part."""

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self._runner, self._ranks = runner, ranks

    def forward(self, step: StepTensors) -> StepResult:
        """Like every runner. Raises RankLost for any failure: an error in one rank's step leaves all ranks out of step."""
        self._ranks.send_step(encode_step(step.arrays))
        try:
            return self._runner.forward(step)
        except (RuntimeError, MemoryError) as error:
            raise self._ranks.lost_because(error) from error


def _backend(config: EngineConfig, device: torch.device, launcher: RankLauncher) -> CollectiveBackend:
    """The configured torch.distributed backend, "auto" resolved. Raises ValueError if it cannot work here."""
    name = config.parallel.backend
    if name == "auto":
        name = "nccl" if device.type == "cuda" else "gloo"
    if name == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        raise ValueError(
            f"parallel.backend 'nccl' works between CUDA devices of a torch with NCCL, not on {device.type}; use 'gloo' or 'auto'"
        )
    if name == "gloo":
        return "gloo"
    size = config.tensor_parallel_size
    if launcher.shows_all_devices and (num_devices := torch.cuda.device_count()) < size:
        raise ValueError(
            f"tensor_parallel_size {size} needs {size} CUDA devices, this machine shows {num_devices}; lower it, or let ranks share a "
            f"device with parallel.backend 'gloo'"
        )
    return "nccl"


def _decided(config: EngineConfig, choice: ModelChoice) -> EngineConfig:
    """`config` with rank 0's choices, so that every rank makes the same ones whatever its machine."""
    return replace(
        config,
        model=choice.source,
        dtype=str(choice.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        device=choice.device.type,  # type: ignore[arg-type]
        runner="transformers" if choice.native_library is None else "native",
    )


def _store(host: str, deadline_s: float) -> Any:
    # Without a given socket the store would listen on every address of the machine.
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        return _dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=deadline_s), master_listen_fd=listener.detach()
        )


def threads_per_rank(config: EngineConfig) -> int:
    """Torch threads of each rank: the configured number, else this machine's cores divided by the number of ranks."""
    return config.num_threads or max(1, num_usable_cores() // config.tensor_parallel_size)
