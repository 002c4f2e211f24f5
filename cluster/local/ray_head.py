"""A Ray of our own on this machine: started once, remembered, and ended without a trace."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from cluster.local.preflight import LaunchError, check_no_other_ray, is_listening

GCS_PORT = 6379
DASHBOARD_PORT = 8265
START_TIMEOUT_S = 60.0
TERMINATE_TIMEOUT_S = 3.0
KILL_TIMEOUT_S = 10.0
OBJECT_STORE_BYTES = 256 * 2**20
_ADDRESS_FILE = Path("/tmp/ray/ray_current_cluster")  # Ray's own, see ray._private.utils
_PARTS = frozenset({"gcs_server", "raylet"})
_REPO_ROOT = Path(__file__).resolve().parents[2]

# Read by every Ray process; measured in messages a second from replica to gateway, the stream path is about four times
# as fast with the first one, which leaves out the proxy (Ray 2.60): the second. Direct ingress would listen on all
# addresses; a log buffer would hide the last lines. Serve's gRPC takes messages up to 4 MiB, and answers with log-probabilities or many
# choices are longer: its limit becomes that of the message format.
RAY_ENVIRONMENT = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.web.proxy.middlewares:middlewares",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": str(_REPO_ROOT),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remembered:
    """Names one process for good: a pid alone may be used again."""

    pid: int
    create_time: float


class RayHead:
    """Owns the file that remembers our Ray, and with it the right to end those processes."""

    def __init__(self, state_dir: Path, environment: Mapping[str, str]) -> None:
        self._state_file = state_dir / "ray.json"
        self._log_file = state_dir / "ray-start.log"
        self._environment = environment

    @property
    def log_file(self) -> Path:
        return self._log_file

    def pids(self) -> set[int]:
        """Every process of our Ray; empty when it does not run."""
        root = self._root()
        if root is None:
            return set()
        try:
            return {root.pid, *(child.pid for child in root.children(recursive=True))}
        except psutil.NoSuchProcess:
            return set()

    @property
    def is_running(self) -> bool:
        """False also for a Ray that has lost a part: a dead dashboard agent takes its raylet along, and the rest answers nobody."""
        root = self._root()
        return root is not None and _names_below(root) >= _PARTS and is_listening(GCS_PORT)

    def start(self) -> None:
        """Starts Ray, with its dashboard on the loopback address, and returns when that answers. Raises LaunchError."""
        self.stop()
        check_no_other_ray((GCS_PORT, DASHBOARD_PORT), ())
        self._state_file.parent.mkdir(parents=True, exist_ok=True)
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--node-ip-address", "127.0.0.1", "--port", str(GCS_PORT)),
            *("--dashboard-host", "127.0.0.1", "--dashboard-port", str(DASHBOARD_PORT)),
            *("--object-store-memory", str(OBJECT_STORE_BYTES), "--disable-usage-stats"),
        ]
        path = f"{Path(sys.executable).parent}:{self._environment.get('PATH', '')}"
        with self._log_file.open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=_REPO_ROOT,
                env={**self._environment, **RAY_ENVIRONMENT, "PATH": path},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        remembered = _Remembered(pid=process.pid, create_time=psutil.Process(process.pid).create_time())
        self._state_file.write_text(json.dumps(asdict(remembered)))
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not is_listening(DASHBOARD_PORT):
            if process.poll() is not None or time.monotonic() > deadline_s:
                self.stop()
                raise LaunchError(f"Ray did not start; its reason is in {self._log_file}: {self._last_log_line()}")
            time.sleep(0.2)

    def stop(self) -> bool:
        """Ends every process of our Ray; False when there was none. Processes of others are never touched."""
        root = self._root()
        self._state_file.unlink(missing_ok=True)
        if root is None:
            return False
        try:
            family = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return False
        # Ray alone takes 20 s to wind down, and leaves a file that makes later `ray.init` calls look for it.
        for end, timeout_s in ((psutil.Process.terminate, TERMINATE_TIMEOUT_S), (psutil.Process.kill, KILL_TIMEOUT_S)):
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    end(process)
            _, family = psutil.wait_procs(family, timeout=timeout_s)
        if _ADDRESS_FILE.exists() and _ADDRESS_FILE.read_text().strip().endswith(f":{GCS_PORT}"):
            _ADDRESS_FILE.unlink()
        return True

    def _root(self) -> psutil.Process | None:
        if not self._state_file.exists():
            return None
        try:
            remembered = _Remembered(**json.loads(self._state_file.read_text()))
            process = psutil.Process(remembered.pid)
            is_ours = abs(process.create_time() - remembered.create_time) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, ValueError, TypeError):  # gone, or a file cut off by a crash
            return None
        return process if is_ours else None

    def _last_log_line(self) -> str:
        lines = [line.strip() for line in self._log_file.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


def _names_below(root: psutil.Process) -> set[str]:
    """Names of the processes that live under `root`."""
    names = set()
    with suppress(psutil.NoSuchProcess):
        for child in root.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE:
                    names.add(child.name())
    return names
