"""Links over an object store that both sides share, for pairs that cannot make a process group. The store is injected."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from kvcache.transfer.link import LinkLost

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class ObjectStore(Protocol):
    """Passes bytes from one process to another."""

    name: str
    """The same in all processes that share the store."""
    errors: tuple[type[Exception], ...]
    """Errors of `put` and `get` when the store, the object or its owner is gone, or a deadline passes."""

    def put(self, data: Bytes) -> str:
        """Stores a copy of `data` until it is freed or this process ends; returns its ticket."""
        ...

    def get(self, ticket: str, deadline_s: float) -> Bytes:
        """The stored bytes, from any process. They may be a view of the store's memory: copy them and drop the view."""
        ...

    def free(self, ticket: str) -> None:
        """Frees an object in the process that put it. An unknown ticket is ignored."""
        ...


class ObjectStoreLink:
    """Owns the messages that it put and the receiver has not received yet. A ticket identifies each message."""

    def __init__(self, store: ObjectStore, device: torch.device, deadline_s: float) -> None:
        self._store, self._device, self._deadline_s = store, device, deadline_s
        self._tickets: list[str] = []

    def announce(self, data: torch.Tensor) -> str:
        try:
            ticket = self._store.put(data.contiguous().view(torch.uint8).cpu().numpy())
        except self._store.errors as error:
            raise LinkLost(f"the object store takes no message of {data.numel() * data.itemsize} bytes: {error}") from error
        self._tickets.append(ticket)
        return ticket

    def send(self, data: torch.Tensor) -> None:
        """Does nothing: the store already has a copy."""

    def settle(self) -> None:
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            self._store.free(ticket)

    def receive(self, ticket: str, num_bytes: int) -> torch.Tensor:
        errors: tuple[type[Exception], ...] = (*self._store.errors, ValueError)  # ValueError: an invalid ticket
        try:
            data = self._store.get(ticket, self._deadline_s).copy()
        except errors as error:
            raise LinkLost(f"the object store does not give a message: {error}") from error
        if data.nbytes != num_bytes:
            raise LinkLost(f"a message of {num_bytes} bytes was announced, the object store has {data.nbytes}")
        return torch.from_numpy(data).to(self._device)

    def close(self) -> None:
        """Frees messages that were not received. A wait in another thread continues to its deadline."""
        self.settle()


class ObjectStoreTransport:
    """Links without connections of their own. Each message is copied twice more than over a process group."""

    name = "object-store"

    def __init__(self, store: ObjectStore, device: torch.device, deadline_s: float = 10.0) -> None:
        """`device` holds the KV on this side; a message that takes longer than `deadline_s` is lost."""
        self._store, self._device, self._deadline_s = store, device, deadline_s

    def invite(self) -> dict[str, Any]:
        return {"store": self._store.name}

    def accept(self, invitation: dict[str, Any]) -> ObjectStoreLink:
        return ObjectStoreLink(self._store, self._device, self._deadline_s)

    def join(self, invitation: dict[str, Any]) -> ObjectStoreLink:
        if invitation["store"] != self._store.name:
            raise LinkLost(f"the source puts its messages into {invitation['store']}, here it is {self._store.name}")
        return ObjectStoreLink(self._store, self._device, self._deadline_s)
