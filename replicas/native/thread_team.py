"""The threads that share the kernels' work: the calling one and workers of our own (team.h)."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ThreadTeam:
    """Owns the worker threads of one engine; they end with this object. Each kernel call names the team that it uses.

    The workers run on the cores that the thread which makes the team may use, and sleep while there is nothing to do. One thread at a
    time calls kernels with a team; a call that finds it at work is computed by its own thread alone.
    """

    def __init__(self, library: ctypes.CDLL, num_threads: int | None = None) -> None:
        """`num_threads` counts the calling thread; None takes torch's number."""
        self.num_threads = torch.get_num_threads() if num_threads is None else num_threads
        library.manta_team_create.restype = ctypes.c_void_p
        address = library.manta_team_create(ctypes.c_int32(self.num_threads))
        self.pointer = ctypes.c_void_p(address)
        weakref.finalize(self, library.manta_team_destroy, self.pointer).atexit = False  # a thread may still be at work then


@contextmanager
def without_torch_threads() -> Iterator[None]:
    """torch computes with the calling thread alone inside. Its own threads spin for milliseconds after each operation that they share, on
    the cores that a team's workers need next."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
