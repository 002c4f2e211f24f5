"""One engine of the bench in a process of its own: `python -m tests.bench.engine_worker '{...}' RESULT.json`.

`tests.bench.engine_bench` starts it, so that neither memory nor thread settings leak from one engine to the next.
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

from tests.bench.machine import measure_quietness
from tests.bench.workload_source import WARM_UP_REPETITION, Cut, Workload, load_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTask:
    """What one worker measures."""

    engine: str
    """quietness, static8, static32, generate_batch, ours (in the dtype that it takes by itself), ours_int8 and ours_int4 (the same
    with quantized weights), or ours_same_dtype (in theirs)."""
    model: str
    dtype: str
    """Of every engine but ours."""
    device: str
    num_threads: int
    repetitions: int
    workloads: list[str]
    cut: Cut
    known_dtype: str | None = None
    """An engine that would run in it is left out: that was measured already."""
    sweep_sizes: list[int] = field(default_factory=list)
    """Of ours alone; empty leaves the sweep and the roofline out."""
    sweep_steps: int = 64


def main() -> int:
    fields = json.loads(sys.argv[1])
    task, result_file = WorkerTask(**{**fields, "cut": Cut(**fields["cut"])}), Path(sys.argv[2])
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

    from replicas.model.loader import resolve_device, resolve_dtype

    disable_progress_bar()
    torch.set_num_threads(task.num_threads)
    device = resolve_device(task.device)
    checkpoint = getattr(AutoConfig.from_pretrained(task.model), "dtype", None)
    # auto: what torch multiplies in on this machine. Emulated bfloat16 would slow the baselines and flatter ours.
    dtype, reason = resolve_dtype(task.dtype, checkpoint, device, is_native=False)
    facts: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "dtype_reason": reason}
    if facts["dtype"] == task.known_dtype:
        return {"skipped": f"{task.known_dtype} is Manta's own dtype"}
    with ExitStack() as stack:
        start_s = time.perf_counter()
        run, sweep = _prepare(task, dtype, device, stack, facts)
        load_s = time.perf_counter() - start_s
        measured: dict[str, dict[str, Any]] = {name: {"num_tokens": [], "times_s": []} for name in task.workloads}
        for repetition in range(task.repetitions):
            for name in task.workloads:
                workload = load_workload(name, task.model, repetition, task.cut)
                seconds = run(workload)
                measured[name]["num_tokens"].append(workload.num_tokens)
                measured[name]["times_s"].append(seconds)
                _note(f"repetition {repetition + 1}/{task.repetitions} of {name}: {workload.num_tokens / seconds:.1f} tokens/s")
        more = sweep()
    return {
        **facts,
        "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        "num_threads": torch.get_num_threads(),
        "version": f"torch {torch.__version__}",
        "load_s": load_s,
        "workloads": measured,
        **more,
    }


def _prepare(
    task: WorkerTask, dtype: Any, device: Any, stack: ExitStack, facts: dict[str, Any]
) -> tuple[Callable[[Workload], float], Callable[[], dict[str, Any]]]:
    """Loads and warms up the engine; gives what runs a workload (seconds), and what comes after. Adds to `facts` what it chose."""
    few = Cut(num_prompts=min(8, task.cut.num_prompts), most_outputs=8)
    warm_up = load_workload("B32", task.model, WARM_UP_REPETITION, few)
    if task.engine.startswith("ours"):
        return _prepare_ours(task, dtype, device, warm_up, facts)
    from tests.bench import transformers_engines

    model = transformers_engines.load(task.model, dtype, device)
    if task.engine == "generate_batch":
        largest = load_workload("B32", task.model, 0, task.cut)
        batching = stack.enter_context(transformers_engines.ContinuousBatching(model, largest))
        batching.run(warm_up, _note)
        return (lambda workload: batching.run(workload, _note)), dict
    batch_size = int(task.engine.removeprefix("static"))
    transformers_engines.run_static(model, warm_up, batch_size, _note)
    return (lambda workload: transformers_engines.run_static(model, workload, batch_size, _note)), dict


def _prepare_ours(
    task: WorkerTask, dtype: Any, device: Any, warm_up: Workload, facts: dict[str, Any]
) -> tuple[Callable[[Workload], float], Callable[[], dict[str, Any]]]:
    import torch

    from replicas.llm import LLM
    from replicas.native.isa import AVX512_BF16
    from replicas.text.tokenizer import Tokenizer
    from tests.bench import manta_engine
    from tests.bench.roofline import QUANTIZED_BITS, measure_roofline, model_cost

    most = max([task.cut.num_prompts, *task.sweep_sizes])
    quantization = task.engine.removeprefix("ours_") if task.engine in ("ours_int8", "ours_int4") else None
    wanted = str(dtype).removeprefix("torch.") if task.engine == "ours_same_dtype" else "auto"
    engine = manta_engine.load(
        task.model, dtype=wanted, quantization=quantization, device=device.type, num_threads=task.num_threads, max_num_seqs=most
    )
    own = engine.description.dtype
    if wanted == "auto":
        facts["dtype_reason"] = "what the engine takes by itself"
    facts |= {"dtype": quantization or own, "runner": f"{engine.description.runner} {engine.description.kernels}".strip()}
    llm = LLM.from_engine(engine, Tokenizer.load(task.model))
    manta_engine.run_workload(llm, warm_up)
    prompts = load_workload("B32", task.model, WARM_UP_REPETITION + 1, task.cut).prompt_ids

    def sweep_and_roofline() -> dict[str, Any]:
        rows = manta_engine.sweep(engine, prompts, task.sweep_sizes, task.sweep_steps, _note)
        found: dict[str, Any] = {"sweep": [asdict(row) for row in rows]}
        if rows and device.type == "cpu":
            cost = model_cost(task.model)
            weight_bits = QUANTIZED_BITS.get(quantization or "", 8.0 * getattr(torch, own).itemsize)
            rounds = own == "bfloat16" and engine.description.kernels == AVX512_BF16.name
            found |= {"cost": asdict(cost), "roofline": asdict(measure_roofline(cost, weight_bits, rounds_activations=rounds))}
        return found

    return (lambda workload: manta_engine.run_workload(llm, workload)), sweep_and_roofline


def _note(text: str) -> None:
    logging.getLogger("bench").info("%s", text)


if __name__ == "__main__":
    sys.exit(main())
