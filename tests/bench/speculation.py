"""Measures what speculative decoding gives: method by workload by batch.

Usage: python -m tests.bench.speculation [--methods ngram suffix] [--workloads EDIT CODE READ CHAT] [--batches 1 2 4 8 32] [--pairs 8]
           [--temperature 0] [--off-grid] [--peers] [--set quantization=int4] [--json FILE] [--picture FILE]

Engines with and without drafts take turns in one process with the same prompts, in alternating order; EOS ends an answer. Answers of
both must be equal. Every run is a tenant of its own, so that no answer is drafted from an earlier one. An answer that repeats itself at
its end is left out, because it would flatter drafts that copy; a pair is then the prompts that are left. A pair's ratio is tokens per
second with drafts over those without; the interval is the 95 % confidence interval of the mean ratio. `predicted` is the ratio that
follows from the rows of the steps of both and the measured cost of rows. TTFT is the mean over requests, in the same pairs. Run it on an
otherwise idle machine.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shlex
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.model.default_model import prepare_default_model
from replicas.request import GenerationRequest, RequestKey
from replicas.sampling_params import SamplingParams
from replicas.speculation_config import SpeculationConfig
from replicas.text.tokenizer import Tokenizer
from tests.bench.machine import hardware_line, measure_quietness, noise_warnings
from tests.bench.paired import _value, interval_of
from tests.off_grid_model import save_off_grid_model
from tests.prompts import conversations, reading_tasks

MAX_TOKENS = 160
LOOP_TOKENS = 48
"""An answer whose last so many tokens have a period of at most a third of them repeats itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One batch on one engine."""

    answers: list[list[int]]
    seconds: float
    ttft_s: float
    row_s: float
    """Seconds of all steps as the measured cost of rows predicts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Results of a method on a workload and batch."""

    method: str
    workload: str
    batch: int
    num_pairs: int
    tokens_per_s: float
    ratio: float
    low: float
    high: float
    predicted: float
    ttft_ratio: float
    tokens_per_pass: float
    """1 + accepted / passes."""
    drafted_share: float
    """Drafts over generated tokens."""


def prompts_of(name: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Chat prompts of a workload."""
    if name == "EDIT":
        texts = [
            f"Repeat the following text exactly, but replace every 'the' by 'a'.\n\n{context[:700]}" for context, _ in reading_tasks("en")
        ]
    elif name == "CODE":
        functions = [
            one
            for module in (textwrap, shlex, statistics, tempfile, json.encoder, json.decoder)
            for _, one in inspect.getmembers(module, inspect.isfunction)
            if one.__module__ == module.__name__ and 200 < len(inspect.getsource(one)) < 1200
        ]
        texts = [
            f"Rename the function `{one.__name__}` to `renamed` and write the whole code again:\n\n```python\n{inspect.getsource(one)}```"
            for one in functions
        ]
    elif name == "READ":
        texts = [f"{context}\n\nQuote the sentence that answers this: {questions[0]}" for context, questions in reading_tasks("en")]
    else:
        texts = [first for first, _ in conversations()]
    return [tokenizer.chat_prompt_ids([{"role": "user", "content": text}]) for text in texts]


def repeats_itself(token_ids: Sequence[int]) -> bool:
    tail = token_ids[-LOOP_TOKENS:]
    periods = range(1, LOOP_TOKENS // 3 + 1)
    return len(tail) == LOOP_TOKENS and any(all(tail[i] == tail[i - period] for i in range(period, LOOP_TOKENS)) for period in periods)


def run_batch(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, name: str, cost: Any) -> Run:
    tokens: dict[RequestKey, list[int]] = {}
    first_s: dict[RequestKey, float] = {}
    row_s = 0.0
    start_s = time.perf_counter()
    for index, prompt in enumerate(prompts):
        request = GenerationRequest(request_id=f"{name}-{index}", prompt_ids=tuple(prompt), params=params, seed=index, tenant=name)
        engine.add_request(request)
        tokens[request.key] = []
    while engine.has_work:
        output = engine.step()
        row_s += cost.seconds(output.num_prefill_tokens + output.num_decode_tokens)
        for item in output.progress:
            if item.token_ids and item.key not in first_s:
                first_s[item.key] = time.perf_counter() - start_s
            tokens[item.key] += item.token_ids
    seconds = time.perf_counter() - start_s
    return Run(answers=list(tokens.values()), seconds=seconds, ttft_s=statistics.fmean(first_s.values()), row_s=row_s)


def measure(
    method: str, name: str, batch: int, engines: tuple[Engine, Engine], prompts: list[list[int]], params: SamplingParams, num_pairs: int
) -> Cell:
    """`engines` are without and with drafts. Raises RuntimeError if their answers differ."""
    plain, drafting = engines
    assert drafting._speculator is not None, "the second engine drafts"
    cost = drafting._speculator.controller.cost
    before = {one.method: one for one in drafting.stats().drafts}
    ratios: list[float] = []
    speeds: list[float] = []
    predicted: list[float] = []
    ttft_ratios: list[float] = []
    num_tokens = 0
    for pair in tqdm(range(-1, num_pairs), f"{method} {name} {batch}", leave=False, disable=not sys.stderr.isatty()):
        chosen = [prompts[(pair * batch + index) % len(prompts)] for index in range(batch)]
        answers = run_batch(plain, chosen, params, f"probe-{method}-{name}-{batch}-{pair}", cost).answers
        kept = [prompt for prompt, answer in zip(chosen, answers, strict=True) if len(answer) > 8 and not repeats_itself(answer)]
        if not kept:
            continue
        runs: dict[bool, Run] = {}
        for drafts in (pair % 2 == 0, pair % 2 != 0):
            runs[drafts] = run_batch(drafting if drafts else plain, kept, params, f"{method}-{name}-{batch}-{pair}", cost)
        if runs[True].answers != runs[False].answers:
            raise RuntimeError(f"{method} {name} {batch}: drafts changed an answer")
        if pair < 0:  # warm-up
            continue
        generated = sum(map(len, runs[True].answers))
        num_tokens += generated
        speeds.append(generated / runs[True].seconds)
        ratios.append(runs[False].seconds / runs[True].seconds)
        predicted.append(runs[False].row_s / runs[True].row_s)
        ttft_ratios.append(runs[True].ttft_s / runs[False].ttft_s)
    after = drafting.stats().drafts
    passes, drafted, accepted = (
        sum(getattr(one, field) - (getattr(before[one.method], field) if one.method in before else 0) for one in after)
        for field in ("num_passes", "num_drafted", "num_accepted")
    )
    mean, low, high = interval_of(ratios) if len(ratios) > 1 else (float("nan"),) * 3
    return Cell(
        method=method,
        workload=name,
        batch=batch,
        num_pairs=len(ratios),
        tokens_per_s=statistics.median(speeds) if speeds else float("nan"),
        ratio=mean,
        low=low,
        high=high,
        predicted=statistics.fmean(predicted) if predicted else float("nan"),
        ttft_ratio=statistics.fmean(ttft_ratios) if ttft_ratios else float("nan"),
        tokens_per_pass=1 + accepted / passes if passes else 1.0,
        drafted_share=drafted / num_tokens if num_tokens else 0.0,
    )


def transformers_ratio(folder: Path, prompts: list[list[int]], num_prompts: int) -> float:
    """Speed of transformers' prompt lookup over its plain greedy generation, one prompt at a time, float32 or bfloat16 as it loads."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    seconds = {False: 0.0, True: 0.0}
    for index, prompt in enumerate(prompts[:num_prompts]):
        for looks_up in (index % 2 == 0, index % 2 != 0):
            options = {"prompt_lookup_num_tokens": 8} if looks_up else {}
            start_s = time.perf_counter()
            ids = torch.tensor([prompt])
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, **options)
            seconds[looks_up] += time.perf_counter() - start_s
    return seconds[False] / seconds[True]


def draw(cells: Sequence[Cell], file: Path) -> None:
    """One panel a workload: the ratio by batch, a line a method with its interval."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    workloads = list(dict.fromkeys(cell.workload for cell in cells))
    figure, panels = plt.subplots(1, len(workloads), figsize=(3.2 * len(workloads), 3.2), sharey=True, squeeze=False)
    for panel, name in zip(panels[0], workloads, strict=True):
        for method in dict.fromkeys(cell.method for cell in cells):
            row = [cell for cell in cells if (cell.workload, cell.method) == (name, method)]
            errors = [[cell.ratio - cell.low for cell in row], [cell.high - cell.ratio for cell in row]]
            panel.errorbar([cell.batch for cell in row], [cell.ratio for cell in row], yerr=errors, marker="o", capsize=2, label=method)
        panel.axhline(1.0, color="grey", linewidth=0.8)
        panel.set(title=name, xscale="log", xlabel="requests at once")
        panel.set_xticks(sorted({cell.batch for cell in cells}), [str(batch) for batch in sorted({cell.batch for cell in cells})])
    panels[0][0].set_ylabel("tokens/s over those without drafts")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.speculation", description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=["ngram", "suffix"])
    parser.add_argument("--workloads", nargs="+", choices=("EDIT", "CODE", "READ", "CHAT"), default=["EDIT", "CODE", "READ", "CHAT"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 32])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--head", help="folder of a draft model or head, for methods that need one")
    parser.add_argument("--off-grid", action="store_true", help="a copy of the default model with weights off their 4-bit grid")
    parser.add_argument("--peers", action="store_true", help="transformers' prompt lookup beside, one prompt at a time")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="engine settings of both")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    num_cores = len(os.sched_getaffinity(0))
    load_before, look = os.getloadavg()[0], measure_quietness(num_cores)
    print(hardware_line(num_cores), options.set or "", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = prepare_default_model()
        if options.off_grid:
            folder = save_off_grid_model(folder, Path(temporary) / "off-grid")
        settings: dict[str, Any] = {"model": str(folder), "max_model_len": 2048, "kv_cache_bytes": 1 << 30, "enable_prefix_caching": False}
        settings |= {key: _value(text) for key, text in (pair.split("=", 1) for pair in options.set)}
        tokenizer = Tokenizer.load(str(folder))
        params = SamplingParams(temperature=options.temperature, max_tokens=MAX_TOKENS)
        prompts = {name: prompts_of(name, tokenizer) for name in options.workloads}
        plain = load_engine(EngineConfig(**settings))
        cells: list[Cell] = []
        for method in options.methods:
            needs_model = method in ("draft_model", "medusa", "eagle", "auto")
            config = SpeculationConfig(method=method, model=options.head if needs_model else None)
            drafting = load_engine(EngineConfig(**settings, speculation=config))
            assert drafting._speculator is not None
            cost = drafting._speculator.controller.cost
            rows = {num: round(1000 * cost.seconds(num), 2) for num in (1, 2, 4, 8, 16, 32)}
            print(f"{method}: ms of a step by rows {rows}, {1e6 * cost.context_s:.3g} ms more a row behind 1,000 tokens", flush=True)
            for name in options.workloads:
                for batch in options.batches:
                    cell = measure(method, name, batch, (plain, drafting), prompts[name], params, options.pairs)
                    cells.append(cell)
                    print(
                        f"{cell.method:8} {cell.workload:5} {cell.batch:3}: {cell.tokens_per_s:7.1f} tokens/s, ratio {cell.ratio:.3f} "
                        f"({cell.low:.3f} to {cell.high:.3f}; predicted {cell.predicted:.3f}), {cell.tokens_per_pass:.2f} tokens a pass, "
                        f"drafted {cell.drafted_share:.2f}, TTFT {cell.ttft_ratio:.3f}, {cell.num_pairs} pairs",
                        flush=True,
                    )
            drafting.close()
        plain.close()
        peers = {}
        if options.peers:
            peers = {name: transformers_ratio(folder, prompts[name], options.pairs) for name in options.workloads}
            print(f"transformers, prompt_lookup_num_tokens=8 over plain: {peers}", flush=True)
    for warning in noise_warnings([look, measure_quietness(num_cores)], load_before, num_cores):
        print(f"warning: {warning}", flush=True)
    if options.json is not None:
        report = {"hardware": hardware_line(num_cores), "settings": settings, "cells": [asdict(cell) for cell in cells], "peers": peers}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.picture is not None:
        draw(cells, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
