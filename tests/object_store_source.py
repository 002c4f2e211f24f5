"""An actor that sends messages through Ray's object store: the process that tests kill."""

from __future__ import annotations

from typing import Any

import torch

from replicas.serve.object_store import object_store_transport

MESSAGE_BYTES = 1 << 18


class ObjectStoreSource:
    """A process that gives messages away."""

    def __init__(self) -> None:
        transport = object_store_transport(torch.device("cpu"))
        self._invitation = transport.invite()
        self._link = transport.accept(self._invitation)

    def invite(self) -> dict[str, Any]:
        return self._invitation

    def announce(self, value: int) -> str:
        """Of the message before, the receiver has taken everything."""
        self._link.settle()
        return self._link.announce(torch.full((MESSAGE_BYTES,), value, dtype=torch.uint8))

    def settle(self) -> None:
        self._link.settle()
