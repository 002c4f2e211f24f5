"""Checks tensor parallelism on GPUs, in one short script: `python -m tests.gpu.check_parallel [--model FOLDER] [--size N]`.

Checks that a group forms and that greedy tokens of several ranks equal those of one device, and measures the step time at both sizes.
With as many GPUs as ranks it uses NCCL; with fewer, ranks share a GPU over Gloo and NCCL forms a group of one. `--device cpu`
tests the script itself. The exit status is 1 when a check failed, and 0 when there is no GPU.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig, ParallelConfig
from replicas.sampling_params import SamplingParams
from replicas.sharding.collectives import ProcessGroup
from tests.bench.manta_engine import sweep
from tests.engine_harness import requests_for, run
from tests.gpu.check_engine import GREEDY, KV_BYTES, Checks, can_check, make_prompts, script_parser, tiny_model

STEP_SIZES = [1, 8, 32]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser("check_parallel", __doc__, "folder of a model; a tiny random one otherwise")
    parser.add_argument("--size", type=int, default=2, help="ranks")
    options = parser.parse_args(arguments)
    if not can_check(options.device):
        return 0
    num_devices = torch.cuda.device_count() if options.device == "cuda" else 0
    backend = "nccl" if num_devices >= options.size else "gloo"
    sys.stdout.write(f"torch {torch.__version__}, {num_devices} CUDA devices, {options.size} ranks over {backend}\n")
    checks = Checks()
    if options.device == "cuda":
        checks.run("NCCL group of one", _nccl_alone)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or tiny_model(Path(folder))
        checks.run("float32 tokens", lambda: _equal(model, options.device, options.size, backend))
        dtype = "bfloat16" if options.device == "cuda" else "float32"
        for size in (1, options.size):
            checks.run(f"{dtype} step times at {size}", lambda size=size: _step_times(model, options.device, size, backend, dtype))
    sys.stdout.write(f"{checks.num_failed} checks failed\n" if checks.num_failed else "all checks passed\n")
    return 1 if checks.num_failed else 0


def _nccl_alone() -> str:
    """Formation, an addition and the smallest value, with this process as the only rank."""
    device = torch.device("cuda", 0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    group = ProcessGroup(store, 0, 1, backend="nccl", device=device, host="127.0.0.1", deadline_s=60.0)
    data = torch.arange(4.0, device=device)
    assert torch.equal(group.all_reduce(data.clone()), data)
    assert group.least(7) == 7
    group.close()
    return "formed, added up, closed"


def _engine(folder: Path, device: str, size: int, backend: str, **settings: Any) -> Engine:
    config = EngineConfig(
        model=str(folder), device=device, tensor_parallel_size=size, kv_cache_bytes=KV_BYTES, max_model_len=512, runner="transformers",
        max_num_batched_tokens=2048, parallel=ParallelConfig(backend=backend), **settings,
    )  # fmt: skip
    return load_engine(config)


def _equal(folder: Path, device: str, size: int, backend: str) -> str:
    answers, worst = [], 0.0
    params = SamplingParams(temperature=0.0, max_tokens=GREEDY.max_tokens, ignore_eos=True, logprobs=5)
    for number in (1, size):
        engine = _engine(folder, device, number, backend, dtype="float32")
        try:
            prompts = make_prompts(engine.description.vocab_size)
            answers.append(run(engine, requests_for(prompts, params)))
        finally:
            engine.close()
    for index, (one, divided) in enumerate(zip(*answers, strict=True)):
        assert one.token_ids == divided.token_ids, f"prompt {index} differs"
        pairs = zip(one.logprobs, divided.logprobs, strict=True)
        worst = max(worst, *(abs(a - b) for x, y in pairs for (_, a), (_, b) in zip(x.top, y.top, strict=True)))
    assert worst < 1e-3, f"log-probabilities differ by {worst:.1e}"
    return f"equal to one device on {len(answers[0])} prompts, log-probabilities within {worst:.1e}"


def _step_times(folder: Path, device: str, size: int, backend: str, dtype: Any) -> str:
    engine = _engine(folder, device, size, backend, dtype=dtype, enable_prefix_caching=False)
    try:
        rows = sweep(engine, make_prompts(engine.description.vocab_size), STEP_SIZES, num_steps=30, note=lambda text: None)
    finally:
        engine.close()
    return ", ".join(f"{row.num_running} running {row.step_ms_p50:.2f} ms" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
