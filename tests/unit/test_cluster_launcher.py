"""`make serve` as a whole, over stand-ins of Ray and Serve: what it refuses before anything starts, and what it tells."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.local import __main__ as command_line
from cluster.local import launcher as module
from cluster.local.launcher import IMPORT_PATH, Launcher
from cluster.local.preflight import LaunchError
from cluster.local.serve_rest import DeployFailed, DeployProgress
from cluster.settings.config import read_environment

TRACE = "Traceback (most recent call last):\n  File x\nray::X.init() (pid=1)\nRuntimeError: outer\nValueError: raise kv_cache_bytes\n"


class _Ray:
    """Never has to start: `begun` tells whether it was."""

    def __init__(self) -> None:
        self.is_running = self.begun = False
        self.log_file = Path("ray-start.log")

    def pids(self) -> set[int]:
        return set()

    def start(self) -> None:
        self.begun = True


class _Serve:
    """Fails as a replica that cannot be made, if it is told to."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails
        self.deployed: list[Mapping[str, Any]] = []

    def deploy(self, config: Mapping[str, Any]) -> None:
        self.deployed.append(config)

    def wait_running(self, timeout_s: float, on_change: Callable[[DeployProgress], None]) -> None:
        if self._fails:
            failures = {"manta": "failed", "replica-a": TRACE}
            raise DeployFailed(DeployProgress(statuses={"manta": "DEPLOY_FAILED"}, replicas={}, waits={}, failures=failures))


class Launch:
    """One run of `make serve` on a machine with two cores and no GPU."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> None:
        self._file = tmp_path / "config.yaml"
        monkeypatch.setenv("MANTA_STATE_DIR", str(tmp_path))
        monkeypatch.setattr(module, "machine_resources", lambda: {"CPU": 2.0})
        monkeypatch.setattr(module, "check_no_other_ray", lambda ports, pids: None)
        monkeypatch.setattr(module, "check_http_port", lambda port, pids: None)
        self.ray, self.serve = _Ray(), _Serve(fails)
        self._launcher = Launcher(read_environment())
        monkeypatch.setattr(self._launcher, "_ray", self.ray)
        monkeypatch.setattr(self._launcher, "_serve", self.serve)
        monkeypatch.setattr(self._launcher, "_wait_healthy", lambda port: None)

    def run(self, *, gateway: dict[str, Any] | None = None, **model: Any) -> None:
        args = {"models": [{"name": "a", "engine": {"model": "org/m"}, **model}], "gateway": gateway or {}}
        self._file.write_text(yaml.safe_dump({"applications": [{"name": "manta", "import_path": IMPORT_PATH, "args": args}]}))
        self._launcher.serve(self._file, 8123, timeout_s=1.0)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ({"num_replicas": 2, "num_cpus": 1.0}, r"2\.2 CPUs are wanted .* Ray counts 2 here: num_cpus 0\.9 \(replica-a\) fits"),
        ({"num_gpus": 1}, r"replica-a wants 1 GPUs .* Ray finds 0 here"),
    ],
)
def test_what_the_machine_can_never_hold_is_told_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], line: str
) -> None:
    launch = Launch(tmp_path, monkeypatch)
    with pytest.raises(LaunchError, match=line):
        launch.run(**model)
    assert not launch.ray.begun


def test_tenant_that_its_limit_slows_down_is_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launch = Launch(tmp_path, monkeypatch)
    with caplog.at_level("INFO"):
        launch.run(num_cpus=0.5, gateway={"priorities": {"highest_by_tenant": {"gold": 10, "silver": -10}}})
    assert launch.serve.deployed
    (caution,) = [record.message for record in caplog.records if "less urgent" in record.message]
    assert "gold: 10 makes gold less urgent" in caution


def test_failed_deployment_is_one_line_and_a_file_with_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError) as error:
        Launch(tmp_path, monkeypatch, fails=True).run(num_cpus=0.5)
    file = tmp_path / "deploy-error.log"
    assert str(error.value) == f"raise kv_cache_bytes (all that Serve says: {file})"
    assert TRACE.strip() in file.read_text()


@pytest.mark.parametrize(("arguments", "timeout_s"), [([], 600.0), (["--timeout", "20"], 20.0)])
@pytest.mark.parametrize("is_watched", [True, False])
def test_command_line_has_a_time_limit_and_hides_bars_from_a_pipe(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], timeout_s: float, is_watched: bool
) -> None:
    given: list[Any] = []
    hidden: list[object] = []
    monkeypatch.setattr(Launcher, "serve", lambda self, *settings: given.extend(settings))
    monkeypatch.setattr(sys, "argv", ["cluster.local", "serve", *arguments])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_watched)
    monkeypatch.setattr(command_line, "hide_bars", hidden.append)
    assert command_line.main() == 0
    assert given == [Path("ray_config.yaml"), None, timeout_s]
    assert hidden == ([] if is_watched else [os.environ])
