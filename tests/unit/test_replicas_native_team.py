"""The thread team of the kernels, built apart with the thread sanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from replicas.native import build

CHECK = Path(__file__).with_name("native") / "team_check.cpp"


def test_a_thread_stopped_at_any_claim_point_changes_no_result_and_races_with_nobody(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    program = tmp_path / "check"
    command = [str(compiler), "-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{build.SOURCE.parent}"]
    source = tmp_path / "empty.cpp"
    source.write_text("int main() {}\n")
    if compiler is None or subprocess.run([*command, str(source), "-o", str(program)], capture_output=True, check=False).returncode:
        pytest.skip("waits for a C++ compiler with the thread sanitizer")
    subprocess.run([*command, str(CHECK), "-o", str(program)], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("right\n")
    assert all(int(line.split()[-2]) > 0 for line in result.stdout.splitlines()[:-1]), "no thread was stopped"
