"""Connects an engine's handoffs: between processes over the available transports, or inside one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from kvcache.ownership import KVOwnership
from kvcache.transfer.in_process import InProcessConnector
from kvcache.transfer.link import Transport, TransportMaker
from kvcache.transfer.process_group import ProcessGroupTransport
from kvcache.transfer.remote import RemoteConnector
from kvcache.transfer.server import TransferServer
from kvcache.transfer.source import KVSource
from replicas.engine_config import EngineConfig
from replicas.handoff.handoffs import Handoffs
from replicas.handoff.other_ranks import OtherRanks
from replicas.model.rank_model import RankModel
from replicas.scheduling.scheduler import Scheduler

TRANSFER_DEADLINE_S = 10.0
"""A peer that is silent this long is given up."""


class HandoffWiring(Protocol):
    """Connects a new engine to others."""

    def check(self, config: EngineConfig, device: torch.device) -> None:
        """Called before anything is loaded. Raises ValueError naming a setting that this wiring does not support."""
        ...

    def attach(self, config: EngineConfig, scheduler: Scheduler, rank: RankModel, fingerprint: str, ranks: OtherRanks) -> Handoffs:
        """Creates the engine's handoffs. `rank` is rank 0; `ranks` are the others, which serve their own heads."""
        ...


class RemoteWiring:
    """Each engine gets a transfer server, and links to the servers of others, made on demand for each pair."""

    def __init__(
        self,
        changed: threading.Event | None = None,
        deadline_s: float = TRANSFER_DEADLINE_S,
        extra_transports: Sequence[TransportMaker] = (),
    ) -> None:
        """`changed` is shared by engines on one thread. `extra_transports` are used where process groups do not work."""
        self._changed, self._deadline_s, self._extra_transports = changed, deadline_s, tuple(extra_transports)

    def check(self, config: EngineConfig, device: torch.device) -> None:
        self._transports(config, device)

    def attach(self, config: EngineConfig, scheduler: Scheduler, rank: RankModel, fingerprint: str, ranks: OtherRanks) -> Handoffs:
        transports = self._transports(config, rank.kv.device)
        ownership = _ownership(config, scheduler, ranks)
        source = KVSource(ownership, rank.kv)
        server = TransferServer(source, {one.name: one for one in transports}, config.transfer_host)
        connector = RemoteConnector(transports, rank.kv, self._deadline_s)

        def close() -> None:
            connector.close()
            server.close()

        return Handoffs(
            scheduler=scheduler,
            ownership=ownership,
            source=source,
            connector=connector,
            address=server.address,
            kv_heads=rank.kv_heads,
            fingerprint=fingerprint,
            ranks=ranks,
            changed=self._changed,
            on_close=close,
        )

    def _transports(self, config: EngineConfig, device: torch.device) -> tuple[Transport, ...]:
        return make_transports(config, device, config.transfer_host, self._extra_transports, self._deadline_s)


class InProcessWiring:
    """Connects engines inside one process; all engines share one object."""

    def __init__(self, changed: threading.Event | None = None) -> None:
        self.connector = InProcessConnector()
        self._changed = changed

    def check(self, config: EngineConfig, device: torch.device) -> None:
        if config.tensor_parallel_size > 1:
            raise ValueError("transfer 'in-process' needs tensor_parallel_size 1: further ranks are processes of their own; use 'auto'")

    def attach(self, config: EngineConfig, scheduler: Scheduler, rank: RankModel, fingerprint: str, ranks: OtherRanks) -> Handoffs:
        ownership = _ownership(config, scheduler, ranks)
        source = KVSource(ownership, rank.kv)
        address = self.connector.serve(source)
        return Handoffs(
            scheduler=scheduler,
            ownership=ownership,
            source=source,
            connector=self.connector,
            address=address,
            kv_heads=rank.kv_heads,
            fingerprint=fingerprint,
            ranks=ranks,
            changed=self._changed,
            on_close=lambda: self.connector.stop(address),
        )


def make_transports(
    config: EngineConfig,
    device: torch.device,
    host: str,
    extra_transports: Sequence[TransportMaker],
    deadline_s: float = TRANSFER_DEADLINE_S,
) -> tuple[Transport, ...]:
    """The transports that `config.kv_transfer` allows, best first. Raises ValueError if there is none."""
    made: list[Transport] = []
    if config.kv_transfer in ("auto", ProcessGroupTransport.name):
        made.append(ProcessGroupTransport(device, host, deadline_s))
    if config.kv_transfer != ProcessGroupTransport.name:
        extra = [make(device) for make in extra_transports]
        made += [one for one in extra if config.kv_transfer in ("auto", one.name)]
    if not made:
        raise ValueError(
            f"kv_transfer {config.kv_transfer!r} is for replicas that Ray serves (make serve), which bring its object store; use 'auto' or "
            f"'process-group' elsewhere"
        )
    return tuple(made)


def _ownership(config: EngineConfig, scheduler: Scheduler, ranks: OtherRanks) -> KVOwnership:
    """Block ownership of a new engine. Its epoch is the time of creation, so that a restarted replica gets another one."""
    return KVOwnership(
        pool=scheduler.pool, epoch=time.time_ns(), lease_s=config.kv_lease_s, clock=time.monotonic, try_close_elsewhere=ranks.try_close
    )
