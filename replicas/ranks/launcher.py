"""Starts the ranks above 0 as processes on this machine; `replicas.serve.rank_launcher` starts Ray actors. Free of torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from replicas.ranks.channel import RankAddress

ROOT = Path(__file__).resolve().parents[2]


class LaunchedRank(Protocol):
    """The process of one rank, starting, running or ended."""

    def why_ended(self) -> str | None:
        """The reason why the process ended; None while it starts or runs."""
        ...

    def kill(self) -> None:
        """Kills the process at once; does nothing if it has ended."""
        ...


class RankLauncher(Protocol):
    """Starts one process for a rank above 0, which then runs `rank_process.run_rank` with the address."""

    host: str
    """This process's address, at which the ranks can reach it."""
    shows_all_devices: bool
    """Whether a rank sees the CUDA devices of all ranks rather than only its own."""

    def launch(self, address: RankAddress, num_threads: int) -> LaunchedRank: ...


class LocalLauncher:
    """Starts processes on this machine, which see the same CUDA devices as this process."""

    host = "127.0.0.1"
    shows_all_devices = True

    def launch(self, address: RankAddress, num_threads: int) -> LaunchedRank:
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [sys.executable, "-m", "replicas.ranks.rank_process"],
            stdin=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # only rank 0 handles an interrupt from the keyboard
        )
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(json.dumps(asdict(address)).encode())  # not an argument: every user can read those
        return _LocalRank(process)


class _LocalRank:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def why_ended(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}; its output says why"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
