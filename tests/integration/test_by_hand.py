"""The README's lines for a Ray of one's own, run as they stand there by a user who never had a Ray."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.local.preflight import is_listening
from cluster.local.ray_head import RAY_ENVIRONMENT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REPO = Path(__file__).resolve().parents[2]
PORTS = (6379, 8265, 8000)
_SECTION = re.compile(r"^### By hand\n.*?^```\n(.*?)^```", re.MULTILINE | re.DOTALL)


def lines_of_the_readme() -> str:
    found = _SECTION.search((REPO / "README.md").read_text(encoding="utf-8"))
    assert found is not None, "README.md has no lines under the heading By hand"
    return found[1]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home folder without a token of Ray, with the models of the real one; all processes that have it end with the test."""
    if taken := [port for port in PORTS if is_listening(port)]:
        pytest.skip(f"waits for the ports {taken}, which another Ray has")
    (tmp_path / ".cache").symlink_to(Path.home() / ".cache")
    yield tmp_path
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == str(tmp_path):
                process.kill()
                process.wait(10)


def test_lines_of_the_readme_bring_the_default_model_up(home: Path) -> None:
    lines = lines_of_the_readme()
    assert len(lines.splitlines()) == 3
    inherited = {name: value for name, value in os.environ.items() if name not in RAY_ENVIRONMENT and not name.startswith("RAY_")}
    script = f"set -e\n{lines}\n.venv/bin/serve status\n"
    done = subprocess.run(
        ["bash", "-c", script], cwd=REPO, env={**inherited, "HOME": str(home)}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "applications" in done.stdout
    deadline_s = time.monotonic() + 150
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen("http://127.0.0.1:8000/health", timeout=5) as health:
            assert json.load(health)["models"] == ["smollm2-135m-instruct"]
            return
        assert time.monotonic() < deadline_s, done.stdout + done.stderr
        time.sleep(0.5)
