"""The client side of a transfer server: sessions over a control channel and a link, kept for the next handoff."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch

from kvcache.handoff import HandoffFailed, KVHandoff
from kvcache.tensors import KVTensors
from kvcache.transfer.control import ControlChannel
from kvcache.transfer.link import DataLink, KVBatch, LinkLost, Transport
from kvcache.transfer.server import IDLE_S
from kvcache.wire import WireFormat, num_values_per_block

logger = logging.getLogger(__name__)

MAX_IDLE_SESSIONS = 4


class RemoteConnector:
    """Owns the idle sessions, and which transports worked for each address."""

    def __init__(
        self, transports: Sequence[Transport], kv: KVTensors, deadline_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`transports` in order of preference: the first that makes a link to an address is kept for it.

        `deadline_s` bounds every wait for a peer, in addition to the time that a read asks it to wait for blocks.
        """
        self.kv, self.deadline_s = kv, deadline_s
        self._transports = tuple(transports)
        self._clock = clock
        self._idle: dict[str, list[RemoteSession]] = {}  # address -> sessions
        self._works: dict[str, dict[str, bool]] = {}  # address -> name of a transport -> whether it worked
        self._lock = threading.Lock()

    def connect(self, address: str) -> RemoteSession:
        """An idle session that still answers, or a new one. Raises LinkLost."""
        while True:
            with self._lock:
                session = idle.pop() if (idle := self._idle.get(address)) else None
            if session is None:
                return self._new_session(address)
            if not session.is_broken():
                return session
            session.close()

    def _new_session(self, address: str) -> RemoteSession:
        reasons = []
        for transport in self._by_preference(address):
            channel = self._reach(address)
            try:
                link = _join(channel, transport, self.deadline_s)
            except HandoffFailed as error:
                channel.close()
                self.note_failure(address, transport.name)
                reasons.append(f"{transport.name}: {error}")
                logger.info("%s cannot be read over %s: %s", address, transport.name, error)
                continue
            except LinkLost as error:
                channel.close()
                raise LinkLost(f"the transfer server at {address} makes no link: {error}") from error
            return RemoteSession(self, address, channel, transport.name, link)
        raise LinkLost(f"the transfer server at {address} makes no link: {'; '.join(reasons)}")

    def _by_preference(self, address: str) -> list[Transport]:
        """Transports that worked for this address first, those that failed last."""
        with self._lock:
            known = dict(self._works.get(address, {}))
        return sorted(self._transports, key=lambda one: {True: 0, None: 1, False: 2}[known.get(one.name)])

    def _reach(self, address: str) -> ControlChannel:
        url = urlsplit(address)
        if url.scheme != "tcp" or url.hostname is None or url.port is None:
            raise LinkLost(f"address {address!r} is not tcp://host:port")
        try:
            return ControlChannel.connect(url.hostname, url.port, self.deadline_s)
        except LinkLost:
            with self._lock:
                self._works.pop(address, None)  # a restarted server has another port
            raise

    def note_success(self, address: str, transport: str) -> None:
        """Records that bytes arrived over this transport."""
        with self._lock:
            self._works.setdefault(address, {})[transport] = True

    def note_failure(self, address: str, transport: str) -> None:
        """Records that this transport made no link, or one that broke. After an earlier success it only becomes unknown again."""
        with self._lock:
            known = self._works.setdefault(address, {})
            if known.pop(transport, None) is not True:
                known[transport] = False

    def try_keep(self, session: RemoteSession) -> bool:
        """Keeps a session for the next handoff; False when enough are idle."""
        session.idle_since_s = self._clock()
        with self._lock:
            stale = self._take_stale()
            idle = self._idle.setdefault(session.address, [])
            is_kept = len(idle) < MAX_IDLE_SESSIONS
            if is_kept:
                idle.append(session)
        for one in stale:
            one.close()
        return is_kept

    def _take_stale(self) -> list[RemoteSession]:
        """Removes and returns sessions that the server has closed by now. Restarted replicas have new addresses, so no later `connect`
        would clean up the old ones."""
        until_s = self._clock() - IDLE_S
        stale = [session for idle in self._idle.values() for session in idle if session.idle_since_s < until_s]
        for address in {session.address for session in stale}:
            self._idle[address] = [session for session in self._idle[address] if session.idle_since_s >= until_s]
            if not self._idle[address]:
                del self._idle[address]
                self._works.pop(address, None)
        return stale

    def close(self) -> None:
        with self._lock:
            sessions = [session for idle in self._idle.values() for session in idle]
            self._idle.clear()
        for session in sessions:
            session.close()


def _join(channel: ControlChannel, transport: Transport, deadline_s: float) -> DataLink:
    """Makes the link. Raises HandoffFailed when another transport may work, and LinkLost when the server cannot be reached."""
    invitation = _ask(channel, {"transport": transport.name}, deadline_s).get("invitation")
    if not isinstance(invitation, dict):
        raise LinkLost("its answer has no invitation")
    try:
        return transport.join(invitation)
    except LinkLost as error:
        raise HandoffFailed(str(error)) from error


def _ask(channel: ControlChannel, message: dict[str, Any], deadline_s: float, wait_s: float = 0.0) -> dict[str, Any]:
    """Sends a message and returns the answer. Raises HandoffFailed for a refusal, and LinkLost when no answer arrives."""
    channel.send(message, deadline_s)
    reply = channel.receive(deadline_s + wait_s)
    if reply.get("ok") is not True:
        raise HandoffFailed(str(reply.get("error", "the source said no without a reason")))
    return reply


class RemoteSession:
    """One control channel and one link to one transfer server."""

    def __init__(self, connector: RemoteConnector, address: str, channel: ControlChannel, transport: str, link: DataLink) -> None:
        """`transport` is the name of the transport that made the link."""
        self.address = address
        self.idle_since_s = 0.0
        self._connector, self._channel, self._transport, self._link = connector, channel, transport, link

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
            expected = int(reply["num_blocks"]) * num_values_per_block(self._connector.kv, form) * self._connector.kv.dtype.itemsize
            if num_bytes != expected:
                raise LinkLost(f"{reply['num_blocks']} blocks take {expected} bytes, but a message of {num_bytes} was announced")
            data = self._receive(reply["ticket"], num_bytes) if num_bytes else self._nothing()
            return KVBatch(
                first=int(reply["first"]),
                num_blocks=int(reply["num_blocks"]),
                data=data.view(self._connector.kv.dtype),
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
        """Asks to renew a lease that never exists; any answer means that the peer is alive."""
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
        self._link.close()

    def _receive(self, ticket: str, num_bytes: int) -> torch.Tensor:
        try:
            data = self._link.receive(ticket, num_bytes)
        except LinkLost:
            self._connector.note_failure(self.address, self._transport)
            raise
        self._connector.note_success(self.address, self._transport)
        return data

    def _nothing(self) -> torch.Tensor:
        return self._connector.kv.layer(0)[0].new_empty(0)

    def _ask(self, message: dict[str, Any], wait_s: float = 0.0) -> dict[str, Any]:
        return _ask(self._channel, message, self._connector.deadline_s, wait_s)
