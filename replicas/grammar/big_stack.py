"""A thread for compiling: deep grammars are compiled by recursion, and a stack that overflows kills the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

STACK_BYTES = 256 << 20
"""Virtual: only what is used takes memory. References in a chain of 5,000 fit."""


class BigStackThread:
    """Runs calls one after the other on its own thread, which lives until `close`."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        before = threading.stack_size(STACK_BYTES)
        try:
            self._executor.submit(_nothing).result()  # starts the thread while the size holds
        finally:
            threading.stack_size(before)

    def call(self, function: Callable[[], Result]) -> Result:
        """Waits for earlier calls, then for this one. Raises what it raises."""
        return self._executor.submit(function).result()

    def close(self) -> None:
        self._executor.shutdown(wait=True)


def _nothing() -> None:
    """A first task."""
