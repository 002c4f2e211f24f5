"""Which instruction sets the kernels can be built for, and which of them this CPU runs."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """A variant of the kernels: its compiler flags, and the CPU flags that it needs to run."""

    name: str
    compiler_flags: tuple[str, ...]
    cpu_flags: frozenset[str]
    rounds_for_quantized: bool = False
    """Whether quantized weights multiply activations rounded to 16-bit integers."""
    rounds_for_bfloat16: bool = False
    """Whether bfloat16 weights multiply activations rounded to bfloat16."""

    @property
    def rounds_activations(self) -> bool:
        return self.rounds_for_quantized or self.rounds_for_bfloat16


PLAIN = InstructionSet("plain", (), frozenset())
"""The baseline of the architecture: SSE2 on x86-64, NEON on 64-bit ARM."""
AVX2 = InstructionSet("avx2", ("-march=x86-64-v3",), frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"}))
AVX512 = InstructionSet("avx512", ("-march=x86-64-v4",), AVX2.cpu_flags | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
AVX512_VNNI = InstructionSet(
    "avx512_vnni", (*AVX512.compiler_flags, "-mavx512vnni"), AVX512.cpu_flags | {"avx512_vnni"}, rounds_for_quantized=True
)
AVX512_BF16 = InstructionSet(
    "avx512_bf16",
    (*AVX512_VNNI.compiler_flags, "-mavx512bf16"),
    AVX512_VNNI.cpu_flags | {"avx512_bf16"},
    rounds_for_quantized=True,
    rounds_for_bfloat16=True,
)
EMULATED = InstructionSet("emulated", ("-O1", "-DMANTA_EMULATE"), frozenset(), rounds_for_quantized=True, rounds_for_bfloat16=True)
"""The arithmetic of AVX512_BF16 in plain C++, for tests on CPUs without it; far too slow to serve."""
BEST_FIRST = (AVX512_BF16, AVX512_VNNI, AVX512, AVX2, PLAIN)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The flags of this machine's CPU by their Linux names; empty where they cannot be read and on other architectures."""
    if platform.machine() not in ("x86_64", "AMD64") or not cpuinfo.exists():
        return frozenset()
    lines = (line for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
    return frozenset(next(lines, "").partition(":")[2].split())


def runnable(flags: frozenset[str]) -> list[InstructionSet]:
    """The variants that a CPU with these flags can run, best first."""
    return [isa for isa in BEST_FIRST if isa.cpu_flags <= flags]
