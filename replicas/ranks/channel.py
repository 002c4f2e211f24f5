"""The TCP connection between rank 0 and another rank, with frames for setup, steps, orders and heartbeats. Free of torch.

When a process dies, its connection closes and the other end knows within milliseconds; a hung process stops answering pings.
"""

from __future__ import annotations

import socket
import struct
import threading
from dataclasses import dataclass
from enum import IntEnum

_HEADER = struct.Struct("<IB")  # bytes of payload, kind


class Kind(IntEnum):
    HELLO = 1
    """From a rank, JSON: its number and the token of its address."""
    SETUP = 2
    """From rank 0, JSON: everything that a rank needs to load its part."""
    READY = 3
    """From a rank: it can take steps. The payload is text for the log."""
    STEP = 4
    PING = 5
    PONG = 6
    FAILED = 7
    """From a rank, text: why it ends."""
    STOP = 8
    ORDER = 9
    """From rank 0: a handoff order (transfer_message.py), executed in order with the steps."""
    ANSWER = 10
    """From a rank: an answer about handoffs (transfer_message.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAddress:
    """The address of rank 0 for a new rank, and that rank's number."""

    host: str
    port: int
    rank: int
    token: str
    """Secret of this replica's ranks; a connection without it is rejected."""


class ChannelClosed(ConnectionError):
    """The other end has gone, or does not read what is sent. Not raised while it is only slow to answer."""


class Channel:
    """Owns one connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket, send_deadline_s: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        seconds, fraction = divmod(send_deadline_s, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(fraction * 1e6)))
        self._connection = connection
        self._lock = threading.Lock()
        self._buffer = memoryview(bytearray(_HEADER.size))

    @property
    def own_host(self) -> str:
        """This end's address, reachable from the other end."""
        host: str = self._connection.getsockname()[0]
        return host

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Raises ChannelClosed, also if the other end reads nothing until the send deadline."""
        try:
            with self._lock:
                self._connection.sendall(_HEADER.pack(len(payload), kind) + payload)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, most_bytes: int = 2**31) -> tuple[Kind, bytes]:
        """Waits for a frame without a deadline. Raises ChannelClosed, also for an invalid frame or one above `most_bytes`."""
        try:
            self._fill(self._buffer)
            size, kind = _HEADER.unpack(self._buffer)
            if size > most_bytes:
                raise ChannelClosed(f"a frame of {size} bytes came where at most {most_bytes} were due")
            payload = bytearray(size)
            self._fill(memoryview(payload))
            return Kind(kind), bytes(payload)
        except (OSError, ValueError) as error:
            raise ChannelClosed(str(error)) from error

    def close(self) -> None:
        """Closes the connection, which also ends a `receive` in another thread."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            self._connection.close()  # the other end closed first
        else:
            self._connection.close()

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._connection.recv_into(view)
            if count == 0:
                raise ChannelClosed("the other end has closed")
            view = view[count:]


def connect(address: RankAddress, deadline_s: float, send_deadline_s: float) -> Channel:
    """Connects to rank 0. Raises ChannelClosed if it cannot be reached."""
    try:
        return Channel(socket.create_connection((address.host, address.port), deadline_s), send_deadline_s)
    except OSError as error:
        raise ChannelClosed(f"rank 0 cannot be reached at {address.host}:{address.port}: {error}") from error
