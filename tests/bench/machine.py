"""The machine of a measurement, and whether it was quiet during it."""

from __future__ import annotations

import os
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

NOISE_LIMIT = 0.15
"""A fixed matmul may take this much longer or shorter before the run counts as noisy."""
_MATMUL_SIZE = 1024
_NUM_MATMULS = 15
_INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quietness:
    """One look at the machine."""

    load_average: float
    """Of the last minute, all processes."""
    matmul_ms: float
    """Median time of a fixed float32 matmul on all threads used."""


def measure_quietness(num_threads: int) -> Quietness:
    """Takes about a second. Runs where the benchmarks run: in a process of its own."""
    import torch

    torch.set_num_threads(num_threads)
    a, b = torch.rand(_MATMUL_SIZE, _MATMUL_SIZE), torch.rand(_MATMUL_SIZE, _MATMUL_SIZE)
    for _ in range(3):
        torch.mm(a, b)
    times_s = []
    for _ in range(_NUM_MATMULS):
        start_s = time.perf_counter()
        torch.mm(a, b)
        times_s.append(time.perf_counter() - start_s)
    return Quietness(load_average=os.getloadavg()[0], matmul_ms=1e3 * statistics.median(times_s))


def noise_warnings(looks: list[Quietness], load_before: float, num_cores: int) -> list[str]:
    """Why the run may not be trusted; empty when the machine was quiet.

    `load_before` is the load average before the bench itself put load on the machine.
    """
    warnings = []
    if load_before > 0.3 * num_cores:
        warnings.append(f"the load average was {load_before:.1f} on {num_cores} cores before the run began")
    times_ms = [look.matmul_ms for look in looks]
    if times_ms and max(times_ms) > (1 + NOISE_LIMIT) * min(times_ms):
        shown = ", ".join(f"{ms:.1f}" for ms in times_ms)
        warnings.append(f"a fixed matmul moved by more than {NOISE_LIMIT:.0%} between the engines: {shown} ms")
    return warnings


def hardware_line(num_cores: int, cpuinfo: Path = Path("/proc/cpuinfo"), meminfo: Path = Path("/proc/meminfo")) -> str:
    """What stands beside published numbers: CPU, cores used, memory, and the instruction sets that matter to a CPU engine."""
    model, flags = _cpu(cpuinfo)
    sets = [name for name in _INSTRUCTION_SETS if name in flags] or ["none of " + ", ".join(_INSTRUCTION_SETS)]
    found = re.search(r"MemTotal:\s+(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    memory = f", {int(found[1]) / 2**20:.0f} GiB of memory" if found else ""
    return f"{model}, {num_cores} of {os.cpu_count()} cores{memory}, {', '.join(sets)}"


def has_bfloat16_units(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU multiplies bfloat16 itself; elsewhere a bfloat16 engine emulates it."""
    return not _cpu(cpuinfo)[1].isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def _cpu(cpuinfo: Path) -> tuple[str, frozenset[str]]:
    """Model name and flags (x86 and ARM)."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}  # the first CPU wins
    flags = values.get("flags") or values.get("Features") or ""
    return values.get("model name") or values.get("CPU part") or "unknown-cpu", frozenset(flags.split())


def hardware_name(cpuinfo: Path = Path("/proc/cpuinfo"), num_cores: int | None = None) -> str:
    """A short name of the CPU that is safe in a file name, with the cores that this process may use: "amd-epyc-2c"."""
    return f"{short_name(_cpu(cpuinfo)[0])}-{num_cores or len(os.sched_getaffinity(0))}c"


def short_name(text: str) -> str:
    """Lower case letters, digits and dashes; marks, clock rates and the word processor left out."""
    text = re.sub(r"\((r|tm|c)\)|@.*|\b\d+-core\b|\bprocessor\b|\bcpu\b", " ", text.lower())
    return re.sub(r"[^a-z0-9.]+", "-", text).strip("-.")[:60] or "unknown"
