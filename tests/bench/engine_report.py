"""Writes the engine bench's numbers as markdown."""

from __future__ import annotations

import statistics
from typing import Any

from tests.bench.roofline import ModelCost, Roofline
from tests.bench.workload_source import WORKLOADS

NAMES = {
    "ours": "Manta",
    "ours_int8": "Manta, int8 weights",
    "ours_int4": "Manta, int4 weights",
    "ours_same_dtype": "Manta in transformers' dtype",
    "vllm_cpu": "vLLM-CPU with libiomp",
    "vllm_cpu_float32": "vLLM-CPU with libiomp, float32",
    "openvino": "OpenVINO GenAI",
    "static8": "transformers, static batches of 8",
    "static32": "transformers, static batches of 32",
    "generate_batch": "transformers, continuous batching (`generate_batch`)",
}


def tokens_per_s(engine: dict[str, Any], workload: str) -> float | None:
    """Median tokens a second; None when the engine gave no numbers for it. Prompt tokens for PREFILL, generated ones otherwise."""
    rates = _rates(engine, workload)
    return statistics.median(rates) if rates else None


def ratios(result: dict[str, Any]) -> dict[tuple[str, str, str], float]:
    """Each of ours over each other engine that ran, as (ours, other, workload) -> factor."""
    engines = result["engines"]
    return {
        (ours, other, workload): mine / theirs
        for ours in engines
        for other in engines
        for workload in WORKLOADS
        if ours.startswith("ours")
        and not other.startswith("ours")
        and (mine := tokens_per_s(engines[ours], workload)) is not None
        and (theirs := tokens_per_s(engines[other], workload)) is not None
    }


def markdown(result: dict[str, Any], picture_name: str | None) -> str:
    lines = [
        f"# {result['model']} on {result['hardware']}, {result['date']}",
        "",
        f"Hardware: {result['hardware_line']}.",
        "",
        _setting(result),
        "",
        *(f"**Warning: {warning}.**" for warning in result["warnings"]),
        *([""] if result["warnings"] else []),
        *_engine_table(result),
    ]
    for name in ("ours", "ours_int8", "ours_int4", "ours_same_dtype"):
        engine = result["engines"].get(name, {})
        lines += _sweep_table(engine) + _limits(engine)
    if picture_name is not None:
        lines += ["", f"![Throughput and step time against running sequences]({picture_name})"]
    looks = ", ".join(f"{look['matmul_ms']:.1f} ms (load {look['load_average']:.1f})" for look in result["quietness"])
    lines += [
        "",
        f"Quietness: a fixed matmul before, between and after the engines took {looks}; load before the run {result['load_before']:.1f}.",
    ]
    return "\n".join(lines) + "\n"


def _rates(engine: dict[str, Any], workload: str) -> list[float]:
    """One for each repetition, or a peer's median alone; empty when there are no numbers."""
    measured = engine.get("workloads", {}).get(workload)
    if measured is None:
        return []
    if "median_tokens_per_s" in measured:
        return [measured["median_tokens_per_s"]]
    return [num / time_s for num, time_s in zip(measured["num_tokens"], measured["times_s"], strict=True)]


def _setting(result: dict[str, Any]) -> str:
    text = (
        "B32: 32 prompts, 16 to 256 tokens each. SINGLE: one answer of 128 tokens. PREFILL: about 1,500 prompt tokens. Tokens a second are "
        "of prompts for PREFILL, of answers otherwise. Greedy, EOS ignored (transformers' static batches suppress it), prefix caching off, "
        f"{result['num_threads']} threads, each engine in a process of its own. Medians of {result['repetitions']} repetitions with "
        f"distinct prompts, least to most in brackets; the peers' scripts print medians of five alone. Commit {result['commit']}."
    )
    if not result["has_bfloat16_units"] and any("bfloat16" in engine.get("dtype", "") for engine in result["engines"].values()):
        text += (
            " This CPU has no bfloat16 units: Manta computes in float32 from bfloat16 weights, vLLM-CPU emulates bfloat16, and its "
            "row in float32 is the fairer one here."
        )
    return text + (" **A quick test of the bench: not a measurement.**" if result["is_quick"] else "")


def _engine_table(result: dict[str, Any]) -> list[str]:
    rates = " | ".join(f"{name} tokens/s" for name in WORKLOADS)
    lines = [
        f"| engine | dtype | {rates} | Manta is faster by, {' / '.join(WORKLOADS)} | peak MiB |",
        "|---|---|" + "---|" * (len(WORKLOADS) + 2),
    ]
    factors = ratios(result)
    for name, engine in result["engines"].items():
        label = NAMES[name] + (
            f", {engine['runner']} runner" if "runner" in engine else f" ({engine['version']})" if "version" in engine else ""
        )
        if "workloads" not in engine:
            lines.append(f"| {label} | | not run: {engine.get('error') or engine['skipped']} |" + " |" * (len(WORKLOADS) + 1))
            continue
        cells = [_cell(_rates(engine, workload)) for workload in WORKLOADS]
        shown = [f"{factors['ours', name, workload]:.2f}x" if ("ours", name, workload) in factors else "-" for workload in WORKLOADS]
        ratio = "" if set(shown) == {"-"} else " / ".join(shown)
        lines.append(f"| {label} | {engine['dtype']} | {' | '.join(cells)} | {ratio} | {engine.get('peak_rss_mib', '')} |")
    same = [
        f"{other} {factor:.2f}x" for (ours, other, workload), factor in factors.items() if (ours, workload) == ("ours_same_dtype", "B32")
    ]
    lines += ["", f"Manta in transformers' dtype over the others, B32: {', '.join(same)}."] if same else []
    return lines + _quantized_lines(result)


def _quantized_lines(result: dict[str, Any]) -> list[str]:
    """What quantized weights give over our own unquantized ones and over OpenVINO's, which have four bits too."""
    lines = []
    for mine, other in (("ours_int8", "ours"), ("ours_int4", "ours"), ("ours_int4", "openvino")):
        rates = [tuple(tokens_per_s(result["engines"].get(name, {}), workload) for name in (mine, other)) for workload in WORKLOADS]
        factors = [f"{a / b:.2f}x" if a is not None and b is not None else "-" for a, b in rates]
        if set(factors) != {"-"}:
            lines.append(f"{NAMES[mine]}, over {NAMES[other]}, {' / '.join(WORKLOADS)}: {' / '.join(factors)}.")
    return ["", "\n".join(lines)] if lines else []


def _cell(rates: list[float]) -> str:
    if not rates:
        return ""
    spread = f" ({min(rates):.1f} to {max(rates):.1f})" if len(rates) > 1 else ""
    return f"{statistics.median(rates):.1f}{spread}"


def _sweep_table(engine: dict[str, Any]) -> list[str]:
    rows = engine.get("sweep") or []
    if not rows:
        return []
    roof = Roofline(**engine["roofline"]) if "roofline" in engine else None
    lines = [
        "",
        f"## Decode steps against the number of running sequences, {engine['dtype']}, {engine['runner']} runner",
        "",
        "| running | step p50 ms | step p95 ms | tokens/s | of the roofline | tokens in KV |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = f"{row['step_ms_p50']:.1f} | {row['step_ms_p95']:.1f} | {row['tokens_per_s']:.0f}"
        share = f"{row['tokens_per_s'] / roof.bound(row['num_running']):.0%}" if roof else ""
        lines += [f"| {row['num_running']} | {times} | {share} | {row['num_context_tokens']} |"]
    return lines


def _limits(engine: dict[str, Any]) -> list[str]:
    """What the machine allows, measured, and how near SINGLE and PREFILL come to it."""
    if "roofline" not in engine:
        return []
    roof, cost = Roofline(**engine["roofline"]), ModelCost(**engine["cost"])
    limits = (
        f"Measured limits: {roof.weight_bytes / 1e6:.0f} MB of weights stream at {roof.bandwidth_bytes_per_s / 1e9:.1f} GB/s, torch's "
        f"matmul of many rows makes {roof.matmul_flops_per_s / 1e9:.0f} GFLOP/s, a token takes {roof.flops_per_token / 1e9:.3f} GFLOP in "
        "linears."
    )
    lines = ["", limits]
    if (single := tokens_per_s(engine, "SINGLE")) is not None:
        floor = 1e3 / roof.bandwidth_bound(1)
        lines.append(f"SINGLE takes {1e3 / single:.1f} ms a token, prompt included; reading the weights alone takes {floor:.1f} ms.")
    if (prefill := tokens_per_s(engine, "PREFILL")) is not None:
        num_tokens = round(statistics.median(engine["workloads"]["PREFILL"]["num_tokens"]))
        rate = cost.prefill_flops(num_tokens) * prefill / num_tokens
        lines.append(
            f"PREFILL computes {rate / 1e9:.0f} GFLOP/s (linears and causal attention of {num_tokens} tokens), "
            f"{rate / roof.matmul_flops_per_s:.0%} of the matmul rate."
        )
    return lines
