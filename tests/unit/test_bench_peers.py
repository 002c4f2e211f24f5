"""Peers that cannot run are reasons, never numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bench import peers
from tests.bench.peers import PeerFailed, PeerTimedOut, parse_figures, reason_of, run_peer


def test_parse_figures_takes_the_last_line_of_results_among_others() -> None:
    output = 'loading\n{"other": 1}\n{"b32_tokens_per_s": 694.0, "single_tokens_per_s": 95, "prefill_tokens_per_s": 2467.0}\nbye\n'
    assert parse_figures(output) == {
        "B32": {"median_tokens_per_s": 694.0}, "SINGLE": {"median_tokens_per_s": 95.0}, "PREFILL": {"median_tokens_per_s": 2467.0},
    }  # fmt: skip


@pytest.mark.parametrize("output", ["", "no numbers", "[1]", '{"b32_tokens_per_s": 1.0}'])
def test_parse_figures_without_results_says_so(output: str) -> None:
    with pytest.raises(PeerFailed, match="no line of results"):
        parse_figures(output)


def test_run_of_a_failing_command_gives_its_last_line() -> None:
    program = "import sys; sys.stderr.write('first\\nillegal instruction\\n'); sys.exit(3)"
    with pytest.raises(PeerFailed, match=r"status 3: illegal instruction$"):
        peers.run_command([sys.executable, "-S", "-c", program], None, 30.0)


def test_reason_is_the_error_and_not_the_line_that_points_to_it() -> None:
    errors = "(EngineCore) RuntimeError: this CPU lacks avx512f\nRuntimeError: Engine core failed. See root cause above.\nbye\n"
    assert reason_of("hello\n", errors) == "(EngineCore) RuntimeError: this CPU lacks avx512f"
    assert reason_of("hello\n", "") == "hello"
    assert reason_of("", "") == "it printed nothing"


def test_run_past_its_time_ends_the_command() -> None:
    with pytest.raises(PeerTimedOut, match="took longer than 0 s"):
        peers.run_command([sys.executable, "-S", "-c", "import threading; threading.Event().wait(60)"], None, 0.05)


def test_run_of_a_missing_command_says_so() -> None:
    with pytest.raises(PeerFailed, match="cannot start /no/such/python"):
        peers.run_command(["/no/such/python"], None, 1.0)


def test_peer_without_its_script_is_an_error_in_the_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "SHARED_BENCH", tmp_path)
    monkeypatch.setattr(peers, "VLLM_FOLDER", tmp_path)
    assert "vllm_cpu.sh is missing" in run_peer("vllm_cpu", "model", 1, 1.0)["error"]


def test_openvino_of_another_model_is_an_error_in_the_result() -> None:
    assert "default model alone" in run_peer("openvino", "/models/another", 1, 1.0)["error"]
