"""Ctrl-C that takes effect between two engine steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class DeferredInterrupt:
    """While entered, SIGINT does not interrupt an engine step, where KV is half written; `check` raises it instead.

    A second SIGINT interrupts at once. No effect outside the main thread, or if the program has its own handler.
    """

    def __init__(self) -> None:
        self._is_pending = False
        self._is_installed = False

    def check(self) -> None:
        """Raises KeyboardInterrupt if a SIGINT arrived."""
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)
            self._is_installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._is_installed = False
        if kind is None:
            self.check()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending:
            signal.default_int_handler(number, frame)
        self._is_pending = True
