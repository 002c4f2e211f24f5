"""A rank above 0 once it knows what to load: its part of the model, run step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from replicas.engine_config import EngineConfig, ParallelConfig
from replicas.model_loader import choose_model, load_model
from replicas.parallel.channel import RankAddress
from replicas.parallel.collectives import ProcessGroup
from replicas.parallel.step_message import decode_step
from replicas.rank_model import RankModel
from replicas.step_tensors import StepTensors

_dist: Any = dist  # the names used here are public, but not in the type stubs


class Follower:
    """Owns this rank's model, KV memory and process group. What it computes goes into the collectives and nowhere else."""

    def __init__(self, setup: Mapping[str, Any], address: RankAddress, own_host: str) -> None:
        """`setup` is what `Leader` wrote. Raises ValueError or RuntimeError with one line that says what is wrong."""
        values = dict(setup["config"])
        config = EngineConfig(**{**values, "parallel": ParallelConfig(**values["parallel"])})
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        choice = choose_model(config)
        if choice.device.type == "cuda":
            # Where each rank sees its own device alone, that is number 0.
            choice = replace(choice, device=torch.device("cuda", address.rank % torch.cuda.device_count()))
            torch.cuda.set_device(choice.device)
        deadline_s = config.parallel.init_deadline_s
        store = _dist.TCPStore(address.host, setup["store_port"], is_master=False, timeout=timedelta(seconds=deadline_s))
        self._group = ProcessGroup(
            store,
            address.rank,
            config.tensor_parallel_size,
            backend=setup["backend"],
            device=choice.device,
            host=own_host,
            deadline_s=deadline_s,
        )
        self._loaded = load_model(choice, self._group)
        self._runner = RankModel.allocate(config, self._loaded, self._group).runner(config)
        self._device = choice.device
        self._group.set_deadline(config.parallel.rank_deadline_s)

    def __str__(self) -> str:
        return str(self._loaded.part)

    def step(self, message: bytes) -> None:
        """The forward pass of one step, together with all other ranks."""
        self._runner.forward(StepTensors.from_arrays(decode_step(message), self._device))

    def close(self) -> None:
        self._group.close()
