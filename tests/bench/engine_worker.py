"""One engine of the bench in a process of its own: `python -m tests.bench.engine_worker '{...}' RESULT.json`.

Started by `tests.bench.engine_bench`, so that neither memory nor thread settings leak from one engine to the next.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.bench import workload_source
from tests.bench.machine import measure_quietness


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTask:
    """What one worker measures."""

    engine: str
    """quietness, static8, static32, generate_batch, ours, or ours_default (ours in the dtype that it takes by itself)."""
    model: str
    dtype: str
    device: str
    num_threads: int
    repetitions: int
    num_prompts: int
    most_outputs: int
    sweep_sizes: list[int] = field(default_factory=list)
    """Of ours alone; empty leaves the sweep out."""
    sweep_steps: int = 64


def main() -> int:
    task, result_file = WorkerTask(**json.loads(sys.argv[1])), Path(sys.argv[2])
    logging.basicConfig(level=logging.INFO, format=f"  {task.engine}: %(message)s")
    for noisy in ("httpx", "transformers", "ContinuousBatchingLogger"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if task.engine == "quietness":
        result: dict[str, Any] = asdict(measure_quietness(task.num_threads))
    else:
        try:
            result = _run_engine(task)
        except (RuntimeError, ValueError, OSError, ImportError, AttributeError, TypeError) as error:  # the result says why
            logging.getLogger("bench").exception("it cannot run here")
            result = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
        result["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    result_file.write_text(json.dumps(result))
    return 0


def _run_engine(task: WorkerTask) -> dict[str, Any]:
    import torch
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    from replicas.model_loader import resolve_device, resolve_dtype

    disable_progress_bar()
    torch.set_num_threads(task.num_threads)
    device = resolve_device(task.device)
    checkpoint = getattr(AutoConfig.from_pretrained(task.model), "dtype", None)
    # auto: what torch multiplies in on this machine. Emulated bfloat16 would slow the baselines and flatter ours.
    dtype, reason = resolve_dtype(task.dtype, checkpoint, device, is_native=False)
    facts: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "dtype_reason": reason}
    times_s: list[float] = []
    with ExitStack() as stack:
        start_s = time.perf_counter()
        run, sweep = _prepare(task, dtype, device, stack, facts)
        load_s = time.perf_counter() - start_s
        if task.engine == "ours_default" and facts["dtype"] == str(dtype).removeprefix("torch."):
            return {"skipped": f"its own dtype is {facts['dtype']}, as above"}
        for repetition in range(task.repetitions):
            workload = _workload(task, repetition)
            times_s.append(run(workload))
            _note(f"repetition {repetition + 1}/{task.repetitions}: {workload.num_useful_tokens / times_s[-1]:.1f} tokens/s")
        sweep_rows = sweep()
    return {
        **facts,
        "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        "num_threads": torch.get_num_threads(),
        "load_s": load_s,
        "num_useful_tokens": _workload(task, 0).num_useful_tokens,
        "times_s": times_s,
        "sweep": sweep_rows,
    }


def _prepare(
    task: WorkerTask, dtype: Any, device: Any, stack: ExitStack, facts: dict[str, Any]
) -> tuple[Callable[[workload_source.Workload], float], Callable[[], list[dict[str, Any]]]]:
    """Loads and warms up the engine; gives what runs a workload (seconds), and the sweep. Adds to `facts` what it chose."""
    warm_up = workload_source.b32(task.model, workload_source.WARM_UP_REPETITION, num_prompts=min(8, task.num_prompts), most_outputs=8)
    if task.engine in ("ours", "ours_default"):
        from replicas.llm import LLM
        from replicas.text.tokenizer import Tokenizer
        from tests.bench import manta_engine

        most = max([task.num_prompts, *task.sweep_sizes])
        own_dtype = "auto" if task.engine == "ours_default" else str(dtype).removeprefix("torch.")
        engine = manta_engine.load(task.model, dtype=own_dtype, device=device.type, num_threads=task.num_threads, max_num_seqs=most)
        facts |= {"dtype": engine.description.dtype, "runner": engine.description.runner}
        llm = LLM.from_engine(engine, Tokenizer.load(task.model))
        manta_engine.run_workload(llm, warm_up)
        prompts = _workload(task, workload_source.WARM_UP_REPETITION + 1).prompt_ids
        return (
            lambda workload: manta_engine.run_workload(llm, workload),
            lambda: [asdict(row) for row in manta_engine.sweep(engine, prompts, task.sweep_sizes, task.sweep_steps, _note)],
        )
    from tests.bench import transformers_engines

    model = transformers_engines.load(task.model, dtype, device)
    if task.engine == "generate_batch":
        batching = stack.enter_context(transformers_engines.ContinuousBatching(model, _workload(task, 0)))
        batching.run(warm_up, _note)
        return (lambda workload: batching.run(workload, _note)), list
    batch_size = int(task.engine.removeprefix("static"))
    transformers_engines.run_static(model, warm_up, batch_size, _note)
    return (lambda workload: transformers_engines.run_static(model, workload, batch_size, _note)), list


def _workload(task: WorkerTask, repetition: int) -> workload_source.Workload:
    return workload_source.b32(task.model, repetition, num_prompts=task.num_prompts, most_outputs=task.most_outputs)


def _note(text: str) -> None:
    logging.getLogger("bench").info("%s", text)


if __name__ == "__main__":
    sys.exit(main())
