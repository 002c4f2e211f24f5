"""Waits that can be interrupted from outside: for a replica that hangs no error ever comes by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Interrupted(Exception):
    """The target of the wait is presumed hung. Not raised when it ends by itself, with an error or without."""


class Interrupts:
    """Owns the waits under way, by what they wait for."""

    def __init__(self) -> None:
        self._scopes: dict[str, set[asyncio.Timeout]] = {}  # what is waited for -> waits

    @asynccontextmanager
    async def guard(self, target: str) -> AsyncGenerator[None, None]:
        """A wait for `target`. Raises Interrupted when it is interrupted, unless the body has ended before."""
        try:
            async with asyncio.timeout(None) as scope:
                self._scopes.setdefault(target, set()).add(scope)
                try:
                    yield
                finally:
                    scopes = self._scopes[target]
                    scopes.discard(scope)
                    if not scopes:
                        del self._scopes[target]
        except TimeoutError as error:
            if scope.expired():
                raise Interrupted(target) from error
            raise

    def interrupt(self, target: str) -> None:
        """Ends every wait for `target` that is under way now."""
        for scope in self._scopes.get(target, ()):
            scope.reschedule(0.0)
