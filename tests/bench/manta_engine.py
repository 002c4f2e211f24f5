"""Measures Manta's engine: the offline API on the workloads, and the step time by the number of running sequences."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.llm import LLM
from replicas.request import GenerationRequest
from replicas.sampling_params import SamplingParams
from tests.bench.workload_source import Workload

_NUM_SETTLING_STEPS = 3
"""Steps at a batch size that are run and not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """Decode-only steps with a fixed number of running sequences."""

    num_running: int
    step_ms_p50: float
    step_ms_p95: float
    tokens_per_s: float
    num_context_tokens: int
    """Tokens in KV of all sequences together, half-way through the steps counted."""


def load(model: str, *, dtype: str, quantization: str | None, device: str, num_threads: int, max_num_seqs: int) -> Engine:
    return load_engine(
        EngineConfig(
            model=model,
            dtype=dtype,  # type: ignore[arg-type]
            quantization=quantization,  # type: ignore[arg-type]
            device=device,  # type: ignore[arg-type]
            num_threads=num_threads,
            max_num_seqs=max_num_seqs,
            max_model_len=2048,
            enable_prefix_caching=False,
        )
    )


def run_workload(llm: LLM, workload: Workload) -> float:
    """Seconds for the workload through `LLM.generate`, from text to text, as the peers' scripts measure it."""
    params = [SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=True) for num in workload.num_outputs]
    start_s = time.perf_counter()
    outputs = llm.generate(workload.texts, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - start_s
    for output, wanted in zip(outputs, workload.num_outputs, strict=True):
        if len(output.outputs[0].token_ids) != wanted:
            raise RuntimeError(f"a request ended with {len(output.outputs[0].token_ids)} tokens instead of {wanted}")
    return elapsed_s


def sweep(engine: Engine, prompts: list[list[int]], sizes: list[int], num_steps: int, note: Callable[[str], None]) -> list[StepRow]:
    """Decode steps at each number of running sequences; `prompts` are taken in turn."""
    rows = []
    for size in sizes:
        params = SamplingParams(temperature=0.0, max_tokens=num_steps + _NUM_SETTLING_STEPS + 64, ignore_eos=True)
        keys = []
        for index in range(size):
            prompt = prompts[index % len(prompts)]
            request = GenerationRequest(request_id=f"sweep-{size}-{index}", prompt_ids=tuple(prompt), params=params, seed=0)
            engine.add_request(request)
            keys.append(request.key)
        times_s: list[float] = []
        context = 0
        while len(times_s) < num_steps + _NUM_SETTLING_STEPS:
            output = engine.step()
            if output.num_prefill_tokens == 0 and output.num_decode_tokens == size:
                times_s.append(output.step_s)
                if len(times_s) == _NUM_SETTLING_STEPS + num_steps // 2:
                    context = engine.stats().num_context_tokens
        for key in keys:
            engine.cancel(key)
        while engine.has_work:
            engine.step()
        counted = sorted(times_s[_NUM_SETTLING_STEPS:])
        median_s = statistics.median(counted)
        rows.append(
            StepRow(
                num_running=size,
                step_ms_p50=1e3 * median_s,
                step_ms_p95=1e3 * counted[min(len(counted) - 1, int(0.95 * len(counted)))],
                tokens_per_s=size / median_s,
                num_context_tokens=context,
            )
        )
        note(f"{size} running: {1e3 * median_s:.1f} ms a step, {size / median_s:.0f} tokens/s")
    return rows
