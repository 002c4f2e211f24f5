"""Draws throughput against batch size under the roofline, and the time of a decode step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.bench.roofline import Roofline


def picture(result: dict[str, Any], path: Path) -> bool:
    """Draws throughput and step time of ours; False, and no file, when there was no sweep."""
    swept = [engine for name, engine in result["engines"].items() if name.startswith("ours") and engine.get("sweep")]
    if not swept:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    for engine in swept:
        rows = engine["sweep"]
        label = f"Manta, {engine['dtype']}, {engine['runner']} runner"
        sizes = [row["num_running"] for row in rows]
        (line,) = left.plot(sizes, [row["tokens_per_s"] for row in rows], "o-", label=label)
        color = line.get_color()
        right.plot(sizes, [row["step_ms_p50"] for row in rows], "o-", color=color, label=f"{label}, p50")
        right.plot(sizes, [row["step_ms_p95"] for row in rows], ":", color=color, label=f"{label}, p95")
        if "roofline" in engine:
            _draw_roofline(left, Roofline(**engine["roofline"]), sizes, engine["dtype"], color)
    left.set(title="Decode throughput", ylabel="tokens/s", yscale="log")
    right.set(title="Decode step", ylabel="time of a step (ms)", ylim=(0, None))
    for axes in (left, right):
        axes.set(xlabel="batch size (running sequences)", xscale="log")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    low, high = left.get_ylim()
    ticks = [tick for power in range(7) for tick in (10**power, 2 * 10**power, 5 * 10**power) if low <= tick <= high]
    left.set_yticks(ticks, [str(tick) for tick in ticks])
    left.minorticks_off()
    left.legend(fontsize="small", loc="lower right")
    right.legend(fontsize="small", loc="upper left")
    figure.suptitle(f"{result['model']}, {result['date']}\n{result['hardware_line']}", fontsize="medium")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _draw_roofline(axes: Any, roof: Roofline, sizes: list[int], dtype: str, color: str) -> None:
    """The bound bends where reading the weights takes as long as multiplying them; that batch size is drawn as well."""
    bend = roof.compute_bound / roof.bandwidth_bound(1)
    points = sorted({float(size) for size in sizes} | ({bend} if min(sizes) < bend < max(sizes) else set()))
    label = (
        f"roofline, {dtype} weights: {roof.bandwidth_bytes_per_s / 1e9:.1f} GB/s streamed over {roof.weight_bytes / 1e6:.0f} MB,\n"
        f"{roof.matmul_flops_per_s / 1e9:.0f} GFLOP/s (matmul) over {roof.flops_per_token / 1e9:.2f} GFLOP a token"
    )
    axes.plot(
        points, [min(size * roof.bandwidth_bound(1), roof.compute_bound) for size in points], "--", color=color, alpha=0.6, label=label
    )
