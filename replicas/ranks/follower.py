"""A rank above 0 after its setup: runs its part of the model in each step, and its part of handoffs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from typing import Any

import torch
import torch.distributed as dist

from kvcache.transfer.link import TransportMaker
from replicas.attention.step_tensors import StepTensors
from replicas.engine_config import EngineConfig, ParallelConfig
from replicas.handoff.wiring import TRANSFER_DEADLINE_S, make_transports
from replicas.model.loader import choose_model, load_model
from replicas.model.rank_model import RankModel
from replicas.ranks.channel import Channel, Kind, RankAddress
from replicas.ranks.follower_transfers import FollowerTransfers
from replicas.ranks.step_message import decode_step
from replicas.sharding.collectives import ProcessGroup

_dist: Any = dist  # the names used here are public, but not in the type stubs


class Follower:
    """Owns this rank's model, KV memory and process group. Its results leave through the collectives, its KV through transfers that
    rank 0 opens."""

    def __init__(
        self, setup: Mapping[str, Any], address: RankAddress, channel: Channel, extra_transports: Sequence[TransportMaker] = ()
    ) -> None:
        """`setup` comes from `Leader`. Raises ValueError or RuntimeError with a one-line reason."""
        values = dict(setup["config"])
        config = EngineConfig(**{**values, "parallel": ParallelConfig(**values["parallel"])})
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        choice = choose_model(config)
        if choice.device.type == "cuda":
            # A rank that sees only its own device finds it as number 0.
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
            host=channel.own_host,
            deadline_s=deadline_s,
        )
        self._loaded = load_model(choice, self._group)
        rank = RankModel.allocate(config, self._loaded, self._group)
        self._runner = rank.runner(config)
        self._transfers: FollowerTransfers | None = None
        if config.role != "unified":
            host = _transfer_host(config, channel.own_host)
            self._transfers = FollowerTransfers(
                rank.kv,
                rank.kv_heads,
                make_transports(config, choice.device, host, extra_transports),
                host=host,
                lease_s=config.kv_lease_s,
                deadline_s=TRANSFER_DEADLINE_S,
                send=partial(channel.send, Kind.ANSWER),
            )
        self._group.set_deadline(config.parallel.rank_deadline_s)

    def __str__(self) -> str:
        return str(self._loaded.part)

    def obey(self, kind: Kind, message: bytes) -> None:
        """Runs a step's forward pass, together with all other ranks, or executes rank 0's order about handoffs."""
        if kind is Kind.STEP:
            self._runner.forward(StepTensors.from_arrays(decode_step(message)))
        else:
            assert self._transfers is not None, "a unified replica hands nothing over"
            self._transfers.obey(message)

    def close(self) -> None:
        if self._transfers is not None:
            self._transfers.close()
        self._group.close()


def _transfer_host(config: EngineConfig, own_host: str) -> str:
    """The address of this rank's transfer server: rank 0's `transfer_host` if both ranks talk over loopback, else this rank's own."""
    return config.transfer_host if ip_address(own_host).is_loopback else own_host
