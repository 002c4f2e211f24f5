"""What the engine bench makes of its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench.engine_report import markdown, picture, ratios, tokens_per_s
from tests.bench.machine import Quietness, hardware_name, noise_warnings, short_name


def _engine(*times_s: float, **more: Any) -> dict[str, Any]:
    return {
        "num_useful_tokens": 3472, "times_s": list(times_s), "dtype": "float32", "dtype_reason": "as configured", "num_threads": 2,
        "device": "cpu", "runner": "native", "peak_rss_mib": 900, "sweep": [], **more,
    }  # fmt: skip


ROW = {"num_running": 8, "step_ms_p50": 20.0, "step_ms_p95": 25.0, "tokens_per_s": 400.0, "num_context_tokens": 640}
RESULT: dict[str, Any] = {
    "model": "tiny", "hardware": "some-cpu-2c", "date": "2026-11-29", "is_quick": False, "commit": "abc", "repetitions": 3,
    "quietness": [{"load_average": 0.1, "matmul_ms": 10.0}], "load_before": 0.1, "warnings": ["the machine was not quiet"],
    "engines": {
        "static32": _engine(34.72, 17.36, 69.44), "generate_batch": {"error": "RuntimeError: no kernel", "peak_rss_mib": 1},
        "ours": _engine(8.68, 8.68, 4.34, sweep=[ROW]),
    },
}  # fmt: skip


def test_tokens_per_s_of_three_repetitions_is_the_median() -> None:
    assert tokens_per_s(RESULT["engines"]["static32"]) == pytest.approx(100.0)
    assert tokens_per_s(RESULT["engines"]["generate_batch"]) is None


def test_ratios_of_an_engine_that_failed_are_left_out() -> None:
    assert ratios(RESULT) == {("ours", "static32"): pytest.approx(4.0)}


def test_markdown_names_warnings_ratios_and_why_an_engine_did_not_run() -> None:
    text = markdown(RESULT, "a.png")
    for part in ("**Warning: the machine was not quiet.**", "- ours/static32: 4.00", "not run: RuntimeError: no kernel", "(a.png)"):
        assert part in text
    assert "| 8 | 20.0 | 25.0 | 400 | 640 |" in text


def test_picture_without_a_sweep_is_not_drawn(tmp_path: Path) -> None:
    assert not picture({**RESULT, "engines": {"ours": _engine(1.0)}}, tmp_path / "none.png")
    assert picture(RESULT, tmp_path / "drawn.png")
    assert [path.name for path in tmp_path.iterdir()] == ["drawn.png"]


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("AMD EPYC 7R13 48-Core Processor", "amd-epyc-7r13"),
        ("Intel(R) Xeon(R) Platinum 8488C CPU @ 2.40GHz", "intel-xeon-platinum-8488c"),
        ("/../", "unknown"),
    ],
)
def test_short_name_is_safe_in_a_file_name(text: str, short: str) -> None:
    assert short_name(text) == short


def test_hardware_name_reads_cpuinfo(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC\nflags\t: avx2\n")
    assert hardware_name(tmp_path / "cpuinfo", num_cores=2) == "amd-epyc-2c"


@pytest.mark.parametrize(
    ("times_ms", "load", "num_warnings"), [((10, 11), 0.2, 0), ((10, 12), 0.2, 1), ((10, 10), 1.5, 1), ((10, 12), 1.5, 2)]
)
def test_noise_beyond_the_limit_is_a_warning(times_ms: tuple[float, ...], load: float, num_warnings: int) -> None:
    looks = [Quietness(load_average=load, matmul_ms=ms) for ms in times_ms]
    assert len(noise_warnings(looks, load, num_cores=2)) == num_warnings
