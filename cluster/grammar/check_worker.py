"""One check process, as the gateway holds it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from cluster.grammar.check_process import framed

_REPO_ROOT = Path(__file__).resolve().parents[2]


class CheckProcessDied(Exception):
    """The process ended in the middle of a check: a limit of time or memory, or an overflow. Not raised after `kill`."""


class CheckWorker:
    """Owns one process, which is started at once and takes some tenths of a second until it is ready. One check at a time."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {**os.environ, "PYTHONPATH": f"{_REPO_ROOT}:{os.environ.get('PYTHONPATH', '')}", "RAYON_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cluster.grammar.check_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a library that gives up may write a client's text there
            )
        ours.setblocking(False)
        self._line = ours
        self._is_ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_ready(self) -> None:
        """Raises CheckProcessDied. A call that is cancelled, here and in `check`, leaves the worker good only for `kill`."""
        if not self._is_ready:
            await self._received()
            self._is_ready = True

    async def check(self, question: dict[str, Any]) -> dict[str, Any]:
        """The process's answer. Raises CheckProcessDied. The worker must be ready."""
        try:
            await asyncio.get_running_loop().sock_sendall(self._line, framed(question))
        except ConnectionError as error:
            raise CheckProcessDied(f"check process {self.pid} died") from error
        return await self._received()

    def cpu_s(self) -> float:
        """Processor seconds of the process so far; 0 if it is gone."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    async def kill(self) -> None:
        """Ends the process, whatever it is doing."""
        self._line.close()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    async def _received(self) -> dict[str, Any]:
        try:
            size = int.from_bytes(await self._exactly(4), "little")
            message: dict[str, Any] = json.loads(await self._exactly(size))
        except ConnectionError as error:
            raise CheckProcessDied(f"check process {self.pid} died") from error
        return message

    async def _exactly(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        parts = bytearray()
        while len(parts) < size:
            part = await loop.sock_recv(self._line, min(1 << 20, size - len(parts)))
            if not part:
                raise ConnectionResetError("the other end closed")
            parts += part
        return bytes(parts)
