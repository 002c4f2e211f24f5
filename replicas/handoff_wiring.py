"""How an engine's handoffs travel: between processes over process groups, or inside one process."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from kvcache.ownership import KVOwnership
from kvcache.tensors import KVTensors
from kvcache.transfer.in_process import InProcessConnector
from kvcache.transfer.process_group import ProcessGroupTransport
from kvcache.transfer.remote import RemoteConnector
from kvcache.transfer.server import TransferServer
from kvcache.transfer.source import KVSource
from replicas.engine_config import EngineConfig
from replicas.handoffs import Handoffs
from replicas.scheduler import Scheduler


class HandoffWiring(Protocol):
    """Gives a new engine its way to others."""

    def attach(self, config: EngineConfig, scheduler: Scheduler, kv: KVTensors, fingerprint: str) -> Handoffs: ...


class ProcessGroupWiring:
    """A transfer server and process groups, made on demand for each pair."""

    def __init__(self, changed: threading.Event | None = None, deadline_s: float = 10.0) -> None:
        """`changed` is shared by engines of one thread; a peer that is silent for `deadline_s` is given up."""
        self._changed, self._deadline_s = changed, deadline_s

    def attach(self, config: EngineConfig, scheduler: Scheduler, kv: KVTensors, fingerprint: str) -> Handoffs:
        source = KVSource(_ownership(config, scheduler), kv)
        transport = ProcessGroupTransport(kv.device, config.transfer_host, self._deadline_s)
        server = TransferServer(source, {transport.name: transport}, config.transfer_host)
        connector = RemoteConnector(transport, kv, self._deadline_s)

        def close() -> None:
            connector.close()
            server.close()

        return Handoffs(
            scheduler=scheduler,
            ownership=source.ownership,
            source=source,
            connector=connector,
            address=server.address,
            fingerprint=fingerprint,
            changed=self._changed,
            on_close=close,
        )


class InProcessWiring:
    """For engines of one process; one object wires them all."""

    def __init__(self, changed: threading.Event | None = None) -> None:
        self.connector = InProcessConnector()
        self._changed = changed

    def attach(self, config: EngineConfig, scheduler: Scheduler, kv: KVTensors, fingerprint: str) -> Handoffs:
        source = KVSource(_ownership(config, scheduler), kv)
        address = self.connector.serve(source)
        return Handoffs(
            scheduler=scheduler,
            ownership=source.ownership,
            source=source,
            connector=self.connector,
            address=address,
            fingerprint=fingerprint,
            changed=self._changed,
            on_close=lambda: self.connector.stop(address),
        )


def _ownership(config: EngineConfig, scheduler: Scheduler) -> KVOwnership:
    """The epoch is the time at which this life began, so that no two lives share one."""
    return KVOwnership(pool=scheduler.pool, epoch=time.time_ns(), lease_s=config.kv_lease_s, clock=time.monotonic)
