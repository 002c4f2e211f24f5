"""Charts of policies. matplotlib is needed only here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# (title, path into a run's figures, whether more is better)
_PANELS = (
    ("prefix hit rate", ("hit_rate",), True),
    ("share within SLO", ("goodput_share",), True),
    ("busiest replica / mean work", ("busiest_to_mean_work",), False),
    ("TTFT p50, s", ("ttft_s", "p50"), False),
    ("TTFT p99, s", ("ttft_s", "p99"), False),
    ("TPOT p99, s", ("tpot_s", "p99"), False),
)


def draw_comparison(runs: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Writes a PNG to `path` with one panel per figure and one bar per policy."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(13, 6.5), layout="constrained")
    names = [str(run["policy"]).replace("_", "\n") for run in runs]
    for axis, (label, keys, more_is_better) in zip(axes.flat, _PANELS, strict=True):
        values = [_value(run, keys) for run in runs]
        colors = ["#d95f02" if run["policy"] == "scoring" else "#7f8fa6" for run in runs]
        bars = axis.bar(names, values, color=colors)
        axis.bar_label(bars, fmt="%.3g", fontsize=8)
        axis.set_title(f"{label} ({'more' if more_is_better else 'less'} is better)", fontsize=9)
        axis.margins(y=0.12)  # room for the labels
        axis.tick_params(labelsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw_goodput(loads: Sequence[float], shares: dict[str, Sequence[float]], title: str, path: Path) -> None:
    """Writes a PNG to `path`: share of requests within SLO against load (1 = saturation), one line per policy."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for policy, values in shares.items():
        axis.plot(loads, values, marker="o", label=policy, linewidth=2.5 if policy == "scoring" else 1.2)
    axis.set_xlabel("load, share of saturation")
    axis.set_ylabel("share of requests within SLO")
    axis.set_ylim(0, 1.02)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    axis.set_title(title, fontsize=9)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _value(run: dict[str, Any], keys: tuple[str, ...]) -> float:
    value: Any = run
    for key in keys:
        value = value.get(key, 0.0)
    return float(value)
