"""Runs vLLM-CPU on the fixed workloads in float32, with the shared script for bfloat16: `vllm_float32.py BENCH_FOLDER MODEL`.

The peer's own Python runs it (`tests.bench.peers`), on CPUs that only emulate bfloat16, where a comparison in bfloat16 would flatter us.
"""

from __future__ import annotations

import sys
from typing import Any


def main() -> None:
    folder = sys.argv.pop(1)
    sys.path.insert(0, folder)
    import vllm
    import vllm_cpu  # the shared script; it takes the model from the command line and `LLM` from the module

    original = vllm.LLM

    def in_float32(**settings: Any) -> Any:
        return original(**{**settings, "dtype": "float32"})

    vllm.LLM = in_float32
    vllm_cpu.main()


if __name__ == "__main__":  # vLLM spawns processes that import this file again
    main()
