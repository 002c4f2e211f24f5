"""The transfer server of a source, with one thread per connected receiver."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping
from typing import Any

import torch

from kvcache.handoff import HandoffFailed
from kvcache.ownership import TransferRef
from kvcache.transfer.control import ControlChannel
from kvcache.transfer.link import DataLink, LinkLost, Transport
from kvcache.transfer.source import KVSource, parse_form

logger = logging.getLogger(__name__)

IDLE_S = 120.0
"""A receiver that is silent for this long is disconnected; it reconnects when it needs to."""
REPLY_DEADLINE_S = 5.0
MAX_WAIT_S = 5.0


class TransferServer:
    """Owns the listening socket and its threads. Independent of the engine's loop, so a draining replica can still be read.

    A broken connection does not end the lease: until it expires a receiver may connect again.
    """

    def __init__(self, source: KVSource, transports: Mapping[str, Transport], host: str = "127.0.0.1") -> None:
        """`transports`: name -> transport; the receiver picks one. Raises OSError when the host has no free port."""
        self._source = source
        self._transports = dict(transports)
        self._listener = socket.create_server((host, 0), backlog=64)
        self.address = f"tcp://{host}:{self._listener.getsockname()[1]}"
        self._channels: set[ControlChannel] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._threads = [threading.Thread(target=self._listen, name="transfer-listen", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            channels = list(self._channels)
        # A thread in accept() does not notice that its socket was closed; a last connection wakes it.
        try:
            socket.create_connection(self._listener.getsockname()[:2], timeout=1.0).close()
        except OSError:
            logger.debug("the listener was gone already")
        self._listener.close()
        for channel in channels:
            channel.close()
        for thread in self._threads:
            thread.join(timeout=REPLY_DEADLINE_S)

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                if self._is_closed:
                    sock.close()
                    return
                channel = ControlChannel(sock)
                self._channels.add(channel)
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                thread = threading.Thread(target=self._serve, args=(channel,), name="transfer-serve", daemon=True)
                self._threads.append(thread)
            thread.start()

    def _serve(self, channel: ControlChannel) -> None:
        link: DataLink | None = None
        try:
            transport = self._greet(channel)
            invitation = _invitation(channel, transport)
            channel.send({"ok": True, "invitation": invitation}, REPLY_DEADLINE_S)
            link = transport.accept(invitation)
            while True:
                message = channel.receive(IDLE_S)
                link.settle()
                self._answer(channel, link, message)
        except LinkLost as error:
            logger.debug("a receiver is gone: %s", error)
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()
            if link is not None:
                link.close()

    def _greet(self, channel: ControlChannel) -> Transport:
        name = channel.receive(REPLY_DEADLINE_S).get("transport")
        transport = self._transports.get(str(name))
        if transport is None:
            channel.send({"ok": False, "error": f"transport {name!r} is not one of {sorted(self._transports)}"}, REPLY_DEADLINE_S)
            raise LinkLost(f"a receiver asked for transport {name!r}")
        return transport

    def _answer(self, channel: ControlChannel, link: DataLink, message: dict[str, Any]) -> None:
        try:
            reply, data = self._do(message)
        except HandoffFailed as error:
            channel.send({"ok": False, "error": str(error)}, REPLY_DEADLINE_S)
            return
        except (KeyError, TypeError, ValueError) as error:
            channel.send({"ok": False, "error": f"the message makes no sense: {error!r}"}, REPLY_DEADLINE_S)
            return
        if data is None or data.numel() == 0:
            channel.send({"ok": True, **reply, "num_bytes": 0}, REPLY_DEADLINE_S)
            return
        ticket = link.announce(data)
        channel.send({"ok": True, **reply, "num_bytes": data.numel() * data.itemsize, "ticket": ticket}, REPLY_DEADLINE_S)
        link.send(data)

    def _do(self, message: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor | None]:
        ref = TransferRef(int(message["lease"]), int(message["epoch"]))
        match message["do"]:
            case "read":
                form = parse_form(message["layers"], message["heads"], message["layout"])
                batch = self._source.read(ref, form, int(message["first"]), min(float(message["wait_s"]), MAX_WAIT_S))
                fields = ("first", "num_blocks", "layout_id", "is_computed", "output_ids", "waited_s")
                return {name: getattr(batch, name) for name in fields}, batch.data
            case "renew":
                self._source.renew(ref)
            case "finish":
                self._source.finish(ref)
            case other:
                raise ValueError(f"do must be read, renew or finish, got {other!r}")
        return {}, None


def _invitation(channel: ControlChannel, transport: Transport) -> dict[str, Any]:
    """The transport's invitation. Raises LinkLost after telling the receiver that it should try another transport."""
    try:
        return transport.invite()
    except (OSError, RuntimeError) as error:
        channel.send({"ok": False, "error": f"transport {transport.name!r} does not work here: {error}"}, REPLY_DEADLINE_S)
        raise LinkLost(f"transport {transport.name!r} makes no invitation: {error}") from error
