"""The control channel between a receiver and a source: JSON messages over a stream socket, each wait with a deadline of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from types import TracebackType
from typing import Any, Self

from kvcache.transfer.link import LinkLost

MAX_MESSAGE_BYTES = 1 << 20
_LENGTH = struct.Struct("!I")


class ControlChannel:
    """Owns one connected socket. Only one thread may use it at a time, but any thread may call `close`, which ends a wait."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(cls, host: str, port: int, deadline_s: float) -> Self:
        """Raises LinkLost when no server answers in time."""
        try:
            return cls(socket.create_connection((host, port), timeout=deadline_s))
        except OSError as error:
            raise LinkLost(f"no transfer server answers at {host}:{port}: {error}") from error

    def send(self, message: dict[str, Any], deadline_s: float) -> None:
        body = json.dumps(message).encode()
        try:
            self._sock.settimeout(deadline_s)
            self._sock.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise LinkLost(f"the control channel broke: {error!r}") from error

    def receive(self, deadline_s: float) -> dict[str, Any]:
        """The next message, within `deadline_s` in total. Raises LinkLost, also for an invalid message."""
        until_s = time.monotonic() + deadline_s
        (size,) = _LENGTH.unpack(self._receive_bytes(_LENGTH.size, until_s))
        if size > MAX_MESSAGE_BYTES:
            raise LinkLost(f"a control message of {size} bytes is more than the {MAX_MESSAGE_BYTES} allowed")
        try:
            message = json.loads(self._receive_bytes(size, until_s))
        except ValueError as error:
            raise LinkLost(f"a control message is not JSON: {error}") from error
        if not isinstance(message, dict):
            raise LinkLost("a control message is not an object")
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the peer closed first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _receive_bytes(self, size: int, until_s: float) -> bytes:
        parts = bytearray()
        try:
            while len(parts) < size:
                self._sock.settimeout(max(1e-3, until_s - time.monotonic()))
                part = self._sock.recv(size - len(parts))
                if not part:
                    raise LinkLost("the peer closed the control channel")
                parts += part
        except OSError as error:
            raise LinkLost(f"the control channel broke: {error!r}") from error
        return bytes(parts)
