"""An object store within this process, which can lose its objects."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np


class ObjectIsGone(Exception):
    """What it raises where a real store tells of a dead owner or a timeout."""


class MemoryStore:
    """Owns the objects that were put and not freed."""

    name = "memory"
    errors: tuple[type[Exception], ...] = (ObjectIsGone,)

    def __init__(self) -> None:
        self.objects: dict[int, Any] = {}  # number, which as text is the ticket -> bytes
        self.is_full = False
        self.num_puts = 0
        self._numbers = itertools.count()

    def put(self, data: Any) -> str:
        if self.is_full:
            raise ObjectIsGone("no room")
        number = next(self._numbers)
        self.objects[number] = np.array(data)
        self.num_puts += 1
        return str(number)

    def get(self, ticket: str, deadline_s: float) -> Any:
        """Raises ValueError for what is no ticket."""
        number = int(ticket)
        if number not in self.objects:
            raise ObjectIsGone(f"object {number} is gone")
        view = self.objects[number].view()
        view.flags.writeable = False  # as in shared memory
        return view

    def free(self, ticket: str) -> None:
        self.objects.pop(int(ticket), None)
