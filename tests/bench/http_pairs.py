"""Compares the service over HTTP of this checkout with that of another one.

Usage: python -m tests.bench.http_pairs OTHER_CHECKOUT [--pairs 20] [--clients 1 16] [--config FILE]

Both checkouts run `make serve` at the same time, each in namespaces of its own (that takes root), so that their ports, their Rays and their
claims on cores do not meet. They take turns under the load of http_load.py, in alternating order: the one that waits is idle. A pair's
ratio is this checkout's figure over the other's; the interval is that of paired.py. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from replicas.model.default_model import DEFAULT_MODEL_NAME
from tests.bench.http_peers import MAX_TOKENS, go_first, may_go_first
from tests.bench.machine import hardware_line
from tests.bench.paired import REPOSITORY, interval_of
from tests.bench.workload_source import SHARED_BENCH

PORT = 8000
CLIENTS = {1: 4, 16: 16}
"""Clients at once -> requests of one round, which is short so that a pair sees the same machine."""
FIGURES = ("tokens_per_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms")
START_TIMEOUT_S = 600.0
NAMESPACE_SCRIPT = "ip link set lo up && mount -t tmpfs tmpfs /tmp && echo up && exec sleep infinity"


class Served:
    """Owns one checkout's service and the namespaces that it runs in: network, processes and /tmp of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        command = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", NAMESPACE_SCRIPT]
        self._namespace = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._namespace.stdout is not None
        if self._namespace.stdout.readline().strip() != "up":
            raise RuntimeError("no namespaces could be made; run this as root")
        (self._first,) = psutil.Process(self._namespace.pid).children()

    def start(self, config: Path) -> None:
        """Returns when it serves. Raises RuntimeError."""
        self._local("serve", "--config", str(config.resolve()), "--port", str(PORT))

    def load(self, num_clients: int) -> dict[str, Any]:
        """One round of http_load.py: its line of JSON."""
        arguments = ["--clients", str(num_clients), "--requests", str(CLIENTS[num_clients]), "--max-tokens", str(MAX_TOKENS)]
        command = [sys.executable, str(SHARED_BENCH / "http_load.py"), str(PORT), DEFAULT_MODEL_NAME, *arguments]
        preexec_fn = go_first if may_go_first() else None
        done = subprocess.run(self._inside(command), check=True, capture_output=True, text=True, timeout=900, preexec_fn=preexec_fn)
        return dict(json.loads(done.stdout))

    def close(self) -> None:
        self._first.kill()  # the first process of a namespace takes all others along
        self._namespace.kill()
        self._namespace.wait()

    def _local(self, *arguments: str) -> None:
        command = [str(self._folder / ".venv" / "bin" / "python"), "-m", "cluster.local", *arguments]
        env = {**os.environ, "MANTA_STATE_DIR": "/tmp/state"}
        done = subprocess.run(
            self._inside(command), cwd=self._folder, env=env, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{self._folder}: {arguments[0]} failed: {(done.stdout + done.stderr)[-2000:]}")

    def _inside(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", "--net", "--mount", "--pid", "--target", str(self._first.pid), f"--wdns={self._folder}", "--", *command]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.http_pairs", description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--clients", type=int, nargs="+", choices=sorted(CLIENTS), default=sorted(CLIENTS))
    parser.add_argument("--config", type=Path, help="of both; absent: each checkout's ray_config.yaml")
    options = parser.parse_args()
    print(hardware_line(os.cpu_count() or 1), flush=True)
    served: list[Served] = []
    found: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {num: [] for num in options.clients}
    try:
        for folder in (REPOSITORY, options.other.resolve()):
            service = Served(folder)
            served.append(service)
            service.start(options.config or folder / "ray_config.yaml")
        for num_clients, pairs in found.items():
            for index in tqdm(range(options.pairs), f"{num_clients} clients", leave=False, disable=not sys.stderr.isatty()):
                order = (0, 1) if index % 2 == 0 else (1, 0)
                results = {each: served[each].load(num_clients) for each in order}
                pairs.append((results[0], results[1]))
            report(num_clients, pairs)
    finally:
        for each in served:
            each.close()
    return 0


def report(num_clients: int, pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for figure in FIGURES:
        ours, theirs = (statistics.median(pair[index][figure] for pair in pairs) for index in (0, 1))
        mean, low, high = interval_of([pair[0][figure] / pair[1][figure] for pair in pairs])
        print(f"{num_clients} clients, {figure}: {ours:.1f} and {theirs:.1f}, ratio {mean:.3f} [{low:.3f}, {high:.3f}]", flush=True)


if __name__ == "__main__":
    sys.exit(main())
