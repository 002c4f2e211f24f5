"""Threads whose stack holds deep recursion."""

from __future__ import annotations

import threading
from collections.abc import Callable

STACK_BYTES = 256 << 20
"""Address space, of which only what is used becomes memory."""
_lock = threading.Lock()


def start_thread(target: Callable[[], None], *, name: str, stack_bytes: int = STACK_BYTES) -> threading.Thread:
    """Starts a daemon thread with a stack of `stack_bytes`."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    with _lock:  # the size is a setting of the whole process
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread
