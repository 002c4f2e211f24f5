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
}


def tokens_per_s(engine: dict[str, Any]) -> float | None:
    """Median useful tokens a second; None when the engine gave no numbers."""
    if "error" in engine:
        return None
    return float(engine["num_useful_tokens"] / statistics.median(engine["times_s"]))


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Ours over each baseline that ran, as name -> factor."""
    rates = {name: tokens_per_s(engine) for name, engine in result["engines"].items()}
    ours = rates.pop("ours", None)
    return {name: ours / rate for name, rate in rates.items() if ours and rate}


def markdown(result: dict[str, Any], picture_name: str | None) -> str:
    engines = result["engines"]
    sample = next((engine for engine in engines.values() if "error" not in engine), {})
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
        "| engine | useful tokens/s | least to most | peak MiB | Manta is faster by |",
        "|---|---|---|---|---|",
    ]
    factors = ratios(result)
    for name, engine in engines.items():
        rate = tokens_per_s(engine)
        if rate is None:
            lines.append(f"| {NAMES[name]} | did not run: {engine['error']} | | | |")
            continue
        each = sorted(engine["num_useful_tokens"] / time_s for time_s in engine["times_s"])
        factor = f"{factors[name]:.2f}x" if name in factors else ""
        lines.append(f"| {NAMES[name]} | {rate:.1f} | {each[0]:.1f} to {each[-1]:.1f} | {engine['peak_rss_mib']} | {factor} |")
    lines += ["", *(f"- ours/{name}: {factor:.2f}" for name, factor in factors.items())]
    lines += _sweep_table(engines.get("ours", {}).get("sweep") or [], picture_name)
    looks = ", ".join(f"{look['matmul_ms']:.1f} ms (load {look['load_average']:.1f})" for look in result["quietness"])
    lines += [
        "",
        f"Quietness: a fixed matmul before, between and after the engines took {looks}; load before the run {result['load_before']:.1f}.",
    ]
    return "\n".join(lines) + "\n"


def _sweep_table(rows: list[dict[str, Any]], picture_name: str | None) -> list[str]:
    if not rows:
        return []
    lines = [
        "",
        "## Decode steps of Manta against the number of running sequences",
        "",
        "| running | step p50 ms | step p95 ms | tokens/s | tokens in KV |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        times = f"{row['step_ms_p50']:.1f} | {row['step_ms_p95']:.1f} | {row['tokens_per_s']:.0f}"
        lines += [f"| {row['num_running']} | {times} | {row['num_context_tokens']} |"]
    if picture_name is not None:
        lines += ["", f"![Throughput and step time against running sequences]({picture_name})"]
    return lines


def picture(result: dict[str, Any], path: Path) -> bool:
    """Draws throughput and step time of ours; False, and no file, when there was no sweep."""
    rows = result["engines"].get("ours", {}).get("sweep") or []
    if not rows:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    sizes = [row["num_running"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(sizes, [row["tokens_per_s"] for row in rows], "o-", color="tab:blue")
    left.set(title="Throughput", ylabel="tokens/s")
    right.plot(sizes, [row["step_ms_p50"] for row in rows], "o-", color="tab:orange", label="p50")
    right.plot(sizes, [row["step_ms_p95"] for row in rows], "o:", color="tab:red", label="p95")
    right.set(title="Decode step", ylabel="ms")
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
