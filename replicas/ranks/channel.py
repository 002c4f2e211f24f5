"""The line between rank 0 and another rank: setup, steps, orders and signs of life, as frames on a TCP connection. Free of torch.

Whoever dies closes the connection, so the other end knows within milliseconds; whoever hangs stops answering pings.
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
    """From a rank: it waits for steps. The payload is text for the log."""
    STEP = 4
    PING = 5
    PONG = 6
    FAILED = 7
    """From a rank, text: why it ends."""
    STOP = 8
    ORDER = 9
    """Of KV that is handed over (transfer_message.py), to be obeyed in turn with the steps."""
    ANSWER = 10
    """From a rank, of the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAddress:
    """Where a rank that starts finds rank 0, and who it is."""

    host: str
    port: int
    rank: int
    token: str
    """Known to this replica's ranks alone; a stranger that connects is turned away."""


class ChannelClosed(ConnectionError):
    """The other end has gone, or does not take what is sent. Not raised while it is only slow to answer."""


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
        """This end's address, which the other end can reach."""
        host: str = self._connection.getsockname()[0]
        return host

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Raises ChannelClosed, also when the other end has taken nothing for the deadline."""
        try:
            with self._lock:
                self._connection.sendall(_HEADER.pack(len(payload), kind) + payload)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, most_bytes: int = 2**31) -> tuple[Kind, bytes]:
        """Waits for as long as it takes. Raises ChannelClosed, also for what is not a frame of at most `most_bytes`."""
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
        """Ends a `receive` of another thread too."""
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
    """To rank 0. Raises ChannelClosed when nobody listens there."""
    try:
        return Channel(socket.create_connection((address.host, address.port), deadline_s), send_deadline_s)
    except OSError as error:
        raise ChannelClosed(f"rank 0 cannot be reached at {address.host}:{address.port}: {error}") from error
