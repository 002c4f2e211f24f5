"""Compiles the CPU kernels once for this machine and loads them.

The library is plain C++ with a C interface, so it needs a compiler but no torch headers, and takes seconds. It is cached by
source, compiler and CPU, appears under its name only when whole, and two processes that build at once do not clash.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp",
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros",
)  # fmt: skip


class NativeUnavailable(RuntimeError):
    """This machine cannot build or load the kernels; the message says why. The torch path serves instead."""


def load_native_library(cache_dir: Path | None = None) -> ctypes.CDLL:
    """The kernels for this machine, built when the cache (`~/.cache/manta/native`) lacks them. Raises NativeUnavailable."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NativeUnavailable("no C++ compiler (g++ or clang++) is installed")
    cache_dir = cache_dir or Path.home() / ".cache" / "manta" / "native"
    path = cache_dir / f"kernels-{_fingerprint(compiler)}.so"
    if not _is_whole(path):
        _build(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"cannot load {path}: {error}") from error


def _is_whole(path: Path) -> bool:
    """Whether the file is what was built: loading a damaged library would end the process."""
    digest = path.with_suffix(".sha256")
    try:
        return digest.read_text() == hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return False


def _build(compiler: str, path: Path) -> None:
    start_s = time.monotonic()
    logger.info("building the CPU kernels with %s (a few seconds, once)", compiler)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(built), *_openmp_runtime()]
            result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if result.returncode != 0:
                raise NativeUnavailable(f"{compiler} failed: {(result.stderr.strip().splitlines() or ['no output'])[0]}")
            digest = built.with_suffix(".sha256")
            digest.write_text(hashlib.sha256(built.read_bytes()).hexdigest())
            built.replace(path)
            digest.replace(path.with_suffix(".sha256"))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"cannot build in {path.parent}: {error}") from error
    logger.info("built the CPU kernels in %.1f s", time.monotonic() - start_s)


def _openmp_runtime() -> list[str]:
    """torch's own OpenMP library, so that both share one pool of threads; a second pool would fight for the cores."""
    bundled = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
    return [str(bundled[0])] if bundled else []


def _fingerprint(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256()
    sources = [*sorted(SOURCE.parent.glob("*.h")), SOURCE]
    for part in (*(source.read_text() for source in sources), *FLAGS, version, _cpu_identity(), torch.__version__, os.fspath(compiler)):
        digest.update(part.encode())
    return digest.hexdigest()[:16]


def _cpu_identity() -> str:
    """What -march=native depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        wanted = ("flags", "Features", "model name", "CPU part")
        return "\n".join(sorted({line for line in cpuinfo.read_text().splitlines() if line.startswith(wanted)}))
    return f"{platform.machine()} {platform.processor()}"
