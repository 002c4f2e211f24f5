"""Turns the bench's numbers into markdown and a picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

NAMES = {
    "static8": "transformers, static batches of 8",
    "static32": "transformers, static batches of 32",
    "generate_batch": "transformers, continuous batching (`generate_batch`)",
    "ours": "Manta",
    "ours_default": "Manta in its own default dtype",
}


def tokens_per_s(engine: dict[str, Any]) -> float | None:
    """Median useful tokens a second; None when the engine gave no numbers."""
    if "error" in engine or "skipped" in engine:
        return None
    return float(engine["num_useful_tokens"] / statistics.median(engine["times_s"]))


def ratios(result: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Each of ours that ran over each baseline that ran, as (ours, baseline) -> factor."""
    rates = {name: rate for name, engine in result["engines"].items() if (rate := tokens_per_s(engine))}
    ours = [name for name in rates if name.startswith("ours")]
    return {(name, other): rates[name] / rates[other] for name in ours for other in rates if other not in ours}


def markdown(result: dict[str, Any], picture_name: str | None) -> str:
    engines = result["engines"]
    sample = next((engine for engine in engines.values() if tokens_per_s(engine)), {})
    quick = " **A quick test of the bench: not a measurement.**" if result["is_quick"] else ""
    setting = (
        f"B32: {sample.get('num_useful_tokens', 0)} useful tokens, greedy, EOS ignored (transformers' static batches suppress it), prefix "
        f"caching off. {sample.get('dtype', '?')} ({sample.get('dtype_reason', '?')}), {sample.get('num_threads', '?')} threads on "
        f"{sample.get('device', '?')}, median of {len(sample.get('times_s', []))} repetitions, each engine in a process of its own, "
        f"commit {result['commit']}.{quick}"
    )
    lines = [
        f"# {result['model']} on {result['hardware']}, {result['date']}",
        "",
        setting,
        "",
        *(f"**Warning: {warning}.**" for warning in result["warnings"]),
        *([""] if result["warnings"] else []),
        "| engine | dtype | useful tokens/s | least to most | peak MiB | Manta is faster by |",
        "|---|---|---|---|---|---|",
    ]
    factors = ratios(result)
    for name, engine in engines.items():
        rate = tokens_per_s(engine)
        if rate is None:
            lines.append(f"| {NAMES[name]} | | not run: {engine.get('error') or engine['skipped']} | | | |")
            continue
        each = sorted(engine["num_useful_tokens"] / time_s for time_s in engine["times_s"])
        factor = f"{factors['ours', name]:.2f}x" if ("ours", name) in factors else ""
        lines.append(
            f"| {NAMES[name]} | {engine['dtype']} | {rate:.1f} | {each[0]:.1f} to {each[-1]:.1f} | {engine['peak_rss_mib']} | {factor} |"
        )
    lines += ["", *(f"- {ours}/{baseline}: {factor:.2f}" for (ours, baseline), factor in factors.items())]
    for name in ("ours", "ours_default"):
        lines += _sweep_table(engines.get(name, {}))
    if picture_name is not None:
        lines += ["", f"![Throughput and step time against running sequences]({picture_name})"]
    looks = ", ".join(f"{look['matmul_ms']:.1f} ms (load {look['load_average']:.1f})" for look in result["quietness"])
    lines += [
        "",
        f"Quietness: a fixed matmul before, between and after the engines took {looks}; load before the run {result['load_before']:.1f}.",
    ]
    return "\n".join(lines) + "\n"


def _sweep_table(engine: dict[str, Any]) -> list[str]:
    rows = engine.get("sweep") or []
    if not rows:
        return []
    lines = [
        "",
        f"## Decode steps against the number of running sequences, {engine['dtype']}, {engine['runner']} runner",
        "",
        "| running | step p50 ms | step p95 ms | tokens/s | tokens in KV |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        times = f"{row['step_ms_p50']:.1f} | {row['step_ms_p95']:.1f} | {row['tokens_per_s']:.0f}"
        lines += [f"| {row['num_running']} | {times} | {row['num_context_tokens']} |"]
    return lines


def picture(result: dict[str, Any], path: Path) -> bool:
    """Draws throughput and step time of ours; False, and no file, when there was no sweep."""
    swept = [engine for name, engine in result["engines"].items() if name.startswith("ours") and engine.get("sweep")]
    if not swept:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for engine in swept:
        rows, dtype = engine["sweep"], engine["dtype"]
        sizes = [row["num_running"] for row in rows]
        (line,) = left.plot(sizes, [row["tokens_per_s"] for row in rows], "o-", label=dtype)
        right.plot(sizes, [row["step_ms_p50"] for row in rows], "o-", color=line.get_color(), label=f"{dtype} p50")
        right.plot(sizes, [row["step_ms_p95"] for row in rows], ":", color=line.get_color(), label=f"{dtype} p95")
    left.set(title="Throughput", ylabel="tokens/s")
    right.set(title="Decode step", ylabel="ms")
    left.legend()
    right.legend()
    for axes in (left, right):
        axes.set(xlabel="running sequences", xscale="log", ylim=(0, None))
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.suptitle(f"{result['model']} on {result['hardware']}, {result['date']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
