"""Links over an object store that both sides share, for pairs that can make no process group. The store is injected."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from kvcache.transfer.link import LinkLost

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class ObjectStore(Protocol):
    """Takes bytes in one process and gives them in another."""

    name: str
    """The same in all processes that share it."""
    errors: tuple[type[Exception], ...]
    """What `put` and `get` raise when the store, the object or who put it is gone, or nothing comes in time."""

    def put(self, data: Bytes) -> str:
        """Copies `data`, which stays until it is freed or this process ends; returns the ticket to it."""
        ...

    def get(self, ticket: str, deadline_s: float) -> Bytes:
        """What was put, in whatever process; perhaps a view of the store itself, so copy it and let go."""
        ...

    def free(self, ticket: str) -> None:
        """In the process that put it. An unknown ticket is ignored."""
        ...


class ObjectStoreLink:
    """Owns the messages that it put and that have not been taken. Every message is found by its ticket."""

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
        """Nothing is left to do: the store has its own copy."""

    def settle(self) -> None:
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            self._store.free(ticket)

    def receive(self, ticket: str, num_bytes: int) -> torch.Tensor:
        errors: tuple[type[Exception], ...] = (*self._store.errors, ValueError)  # the last for what is no ticket
        try:
            data = self._store.get(ticket, self._deadline_s).copy()
        except errors as error:
            raise LinkLost(f"the object store does not give a message: {error}") from error
        if data.nbytes != num_bytes:
            raise LinkLost(f"a message of {num_bytes} bytes was announced, the object store has {data.nbytes}")
        return torch.from_numpy(data).to(self._device)

    def close(self) -> None:
        """Gives back what was not taken. A wait in another thread goes on to its deadline."""
        self.settle()


class ObjectStoreTransport:
    """Needs nothing but the store: a link costs no connection. Two copies more than a process group."""

    name = "object-store"

    def __init__(self, store: ObjectStore, device: torch.device, deadline_s: float = 10.0) -> None:
        """KV is and goes to `device`; a message that does not come within `deadline_s` is lost."""
        self._store, self._device, self._deadline_s = store, device, deadline_s

    def invite(self) -> dict[str, Any]:
        return {"store": self._store.name}

    def accept(self, invitation: dict[str, Any]) -> ObjectStoreLink:
        return ObjectStoreLink(self._store, self._device, self._deadline_s)

    def join(self, invitation: dict[str, Any]) -> ObjectStoreLink:
        if invitation["store"] != self._store.name:
            raise LinkLost(f"the source puts its messages into {invitation['store']}, here it is {self._store.name}")
        return ObjectStoreLink(self._store, self._device, self._deadline_s)
