"""The receiver's side of a transfer server: sessions over a control channel and a link, kept for the next handoff."""

from __future__ import annotations

import threading
from typing import Any
from urllib.parse import urlsplit

from kvcache.handoff import HandoffFailed, KVHandoff
from kvcache.tensors import KVTensors
from kvcache.transfer.control import ControlChannel
from kvcache.transfer.link import DataLink, KVBatch, LinkLost, Transport
from kvcache.wire import WireFormat, num_values_per_block

MAX_IDLE_SESSIONS = 4


class RemoteConnector:
    """Owns the sessions that wait for their next handoff, by address."""

    def __init__(self, transport: Transport, kv: KVTensors, deadline_s: float = 10.0) -> None:
        """`deadline_s` bounds every wait for a peer, besides the wait for blocks that it was asked to make."""
        self._transport, self._kv, self._deadline_s = transport, kv, deadline_s
        self._idle: dict[str, list[RemoteSession]] = {}  # address -> sessions
        self._lock = threading.Lock()

    def connect(self, address: str) -> RemoteSession:
        """An idle session that still answers, or a new one. Raises LinkLost."""
        while True:
            with self._lock:
                session = idle.pop() if (idle := self._idle.get(address)) else None
            if session is None:
                return RemoteSession(self, address, self._transport, self._kv, self._deadline_s)
            if not session.is_broken():
                return session
            session.close()

    def try_keep(self, session: RemoteSession) -> bool:
        """Takes a session back for the next handoff; False when there are enough."""
        with self._lock:
            idle = self._idle.setdefault(session.address, [])
            if len(idle) >= MAX_IDLE_SESSIONS:
                return False
            idle.append(session)
            return True

    def close(self) -> None:
        with self._lock:
            sessions = [session for idle in self._idle.values() for session in idle]
            self._idle.clear()
        for session in sessions:
            session.close()


class RemoteSession:
    """One control channel and one link to one transfer server."""

    def __init__(self, connector: RemoteConnector, address: str, transport: Transport, kv: KVTensors, deadline_s: float) -> None:
        self.address = address
        self._connector, self._kv, self._deadline_s = connector, kv, deadline_s
        url = urlsplit(address)
        if url.scheme != "tcp" or url.hostname is None or url.port is None:
            raise LinkLost(f"address {address!r} is not tcp://host:port")
        self._channel = ControlChannel.connect(url.hostname, url.port, deadline_s)
        self._link: DataLink | None = None
        try:
            self._link = transport.join(self._ask({"transport": transport.name})["invitation"])
        except (LinkLost, HandoffFailed, KeyError) as error:
            self.close()
            raise LinkLost(f"the transfer server at {address} makes no link: {error}") from error

    def read(self, handoff: KVHandoff, form: WireFormat, first: int, wait_s: float) -> KVBatch:
        reply = self._ask(
            {
                "do": "read", "lease": handoff.lease, "epoch": handoff.epoch, "layers": form.layers, "heads": form.heads,
                "layout": form.layout.id, "first": first, "wait_s": wait_s,
            },
            wait_s,
        )  # fmt: skip
        try:
            num_bytes = int(reply["num_bytes"])
            expected = int(reply["num_blocks"]) * num_values_per_block(self._kv, form) * self._kv.dtype.itemsize
            if num_bytes != expected:
                raise LinkLost(f"{reply['num_blocks']} blocks take {expected} bytes, but a message of {num_bytes} was announced")
            assert self._link is not None, "a session has its link from the start"
            data = self._link.receive(reply["ticket"] if num_bytes else "", num_bytes) if num_bytes else self._nothing()
            return KVBatch(
                first=int(reply["first"]),
                num_blocks=int(reply["num_blocks"]),
                data=data.view(self._kv.dtype),
                layout_id=reply["layout_id"],
                is_computed=bool(reply["is_computed"]),
                output_ids=tuple(reply["output_ids"]),
                waited_s=float(reply["waited_s"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise LinkLost(f"the transfer server's answer makes no sense: {error!r}") from error

    def renew(self, handoff: KVHandoff) -> None:
        self._ask({"do": "renew", "lease": handoff.lease, "epoch": handoff.epoch})

    def finish(self, handoff: KVHandoff) -> None:
        self._ask({"do": "finish", "lease": handoff.lease, "epoch": handoff.epoch})

    def is_broken(self) -> bool:
        """Asks for a lease that never is; an answer means that the peer lives."""
        try:
            self._ask({"do": "renew", "lease": -1, "epoch": 0})
        except HandoffFailed:
            return False
        except LinkLost:
            return True
        return True

    def close(self, *, is_reusable: bool = False) -> None:
        if is_reusable and self._connector.try_keep(self):
            return
        self._channel.close()
        if self._link is not None:
            self._link.close()

    def _nothing(self) -> Any:
        return self._kv.layer(0)[0].new_empty(0)

    def _ask(self, message: dict[str, Any], wait_s: float = 0.0) -> dict[str, Any]:
        self._channel.send(message, self._deadline_s)
        reply = self._channel.receive(self._deadline_s + wait_s)
        if reply.get("ok") is not True:
            raise HandoffFailed(str(reply.get("error", "the source said no without a reason")))
        return reply
