"""Handoffs between engines of one process: the receiver reads the source's blocks itself."""

from __future__ import annotations

import threading

from kvcache.handoff import KVHandoff
from kvcache.ownership import TransferRef
from kvcache.transfer.link import KVBatch, LinkLost
from kvcache.transfer.source import KVSource
from kvcache.wire import WireFormat

SCHEME = "in-process://"


class InProcessConnector:
    """Owns the addresses of the sources in this process."""

    def __init__(self) -> None:
        self._sources: dict[str, KVSource] = {}  # address -> source

    def serve(self, source: KVSource) -> str:
        """Makes a source reachable; returns its address."""
        address = f"{SCHEME}{len(self._sources)}"
        self._sources[address] = source
        return address

    def stop(self, address: str) -> None:
        """Makes the source unreachable: its receivers get LinkLost from now on."""
        self._sources.pop(address, None)

    def connect(self, address: str) -> InProcessSession:
        return InProcessSession(self, address)

    def source(self, address: str) -> KVSource:
        if (source := self._sources.get(address)) is None:
            raise LinkLost(f"no source answers at {address}")
        return source


class InProcessSession:
    """One receiver's session with one source of the same process."""

    def __init__(self, connector: InProcessConnector, address: str) -> None:
        self._connector, self._address = connector, address
        self._is_closed = threading.Event()
        connector.source(address)

    def read(self, handoff: KVHandoff, form: WireFormat, first: int, wait_s: float) -> KVBatch:
        return self._source().read(_ref(handoff), form, first, wait_s)

    def renew(self, handoff: KVHandoff) -> None:
        self._source().renew(_ref(handoff))

    def finish(self, handoff: KVHandoff) -> None:
        self._source().finish(_ref(handoff))

    def close(self, *, is_reusable: bool = False) -> None:
        self._is_closed.set()

    def _source(self) -> KVSource:
        if self._is_closed.is_set():
            raise LinkLost("this session was closed")
        return self._connector.source(self._address)


def _ref(handoff: KVHandoff) -> TransferRef:
    return TransferRef(handoff.lease, handoff.epoch)
