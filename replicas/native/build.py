"""Compiles the CPU kernels once per kind of machine and loads them.

The library is plain C++ with a C interface: it needs a compiler but no torch headers, and builds in seconds. The cache is keyed by
source, compiler and instruction set, so that machines with a shared home folder never load a library that they cannot run. A library
appears under its name only when complete, and two processes may build at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from replicas.native.isa import BEST_FIRST, EMULATED, InstructionSet, cpu_flags, runnable

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = (
    "-O3", "-mtune=native", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fopenmp-simd",
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros",
)  # fmt: skip


class NativeUnavailable(RuntimeError):
    """This machine cannot build or load the kernels; the message says why. torch code is used instead."""


class _CompilerFailed(NativeUnavailable):
    """The compiler ran and failed: it may be too old for this variant but able to build the next one."""


def load_native_library(cache_dir: Path | None = None, variants: Sequence[InstructionSet] = ()) -> ctypes.CDLL:
    """The kernels in the first of `variants` that the compiler can build; by default all that this CPU can run, best first.

    Builds them when the cache (`~/.cache/manta/native`) lacks them. Raises NativeUnavailable.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NativeUnavailable("no C++ compiler (g++ or clang++) is installed")
    cache_dir = cache_dir or Path.home() / ".cache" / "manta" / "native"
    *better, last = variants or runnable(cpu_flags())
    for isa in better:
        try:
            return _load(compiler, isa, cache_dir)
        except _CompilerFailed as error:
            logger.info("no CPU kernels for %s: %s", isa.name, error)
    return _load(compiler, last, cache_dir)


def variant_of(library: ctypes.CDLL) -> InstructionSet:
    """Which variant of the kernels was loaded."""
    library.manta_variant.restype = ctypes.c_char_p
    name = library.manta_variant().decode()
    return next(isa for isa in (*BEST_FIRST, EMULATED) if isa.name == name)


def _load(compiler: str, isa: InstructionSet, cache_dir: Path) -> ctypes.CDLL:
    path = cache_dir / f"kernels-{isa.name}-{_fingerprint(compiler, isa)}.so"
    if not _is_whole(path):
        _build(compiler, isa, path)
    logger.info("CPU kernels: %s", isa.name)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"cannot load {path}: {error}") from error


def _is_whole(path: Path) -> bool:
    """Whether the file is complete and unchanged: loading a damaged library would kill the process."""
    digest = path.with_suffix(".sha256")
    try:
        return digest.read_text() == hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return False


def _build(compiler: str, isa: InstructionSet, path: Path) -> None:
    start_s = time.monotonic()
    logger.info("building the CPU kernels for %s with %s (a few seconds, once)", isa.name, compiler)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            name = f'-DMANTA_VARIANT="{isa.name}"'
            command = [compiler, *FLAGS, *isa.compiler_flags, name, str(SOURCE), "-o", str(built)]
            result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if result.returncode != 0:
                raise _CompilerFailed(f"{compiler} failed: {(result.stderr.strip().splitlines() or ['no output'])[0]}")
            digest = built.with_suffix(".sha256")
            digest.write_text(hashlib.sha256(built.read_bytes()).hexdigest())
            built.replace(path)
            digest.replace(path.with_suffix(".sha256"))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"cannot build in {path.parent}: {error}") from error
    logger.info("built the CPU kernels in %.1f s", time.monotonic() - start_s)


def _fingerprint(compiler: str, isa: InstructionSet) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    sources = [*sorted(SOURCE.parent.glob("*.h")), SOURCE]
    digest = hashlib.sha256()
    for part in (*(source.read_text() for source in sources), *FLAGS, *isa.compiler_flags, version, platform.machine()):
        digest.update(part.encode())
    return digest.hexdigest()[:16]
