"""The local launcher's checks: each failure is one line that says what to do."""

from __future__ import annotations

import io
import json
import os
import shlex
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cluster.local import ray_head, serve_rest
from cluster.local.launcher import check_applications, read_serve_config, success_message
from cluster.local.preflight import LaunchError, check_disk, check_http_port, check_no_other_ray, is_listening
from cluster.local.ray_head import RayHead
from cluster.local.serve_keys import check_serve_keys
from cluster.local.serve_rest import DeployFailed, DeployProgress, ServeRest, auth_headers, cause_of


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def config_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_taken_port_names_its_owner_and_another_port(taken_port: int) -> None:
    with pytest.raises(LaunchError, match=rf"port {taken_port} is taken by .*pid {os.getpid()}.*make serve PORT={taken_port + 1}"):
        check_http_port(taken_port, ())


def test_port_taken_by_ourselves_is_fine(taken_port: int) -> None:
    check_http_port(taken_port, {os.getpid()})


def test_free_port_is_fine() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert not is_listening(port)
    check_http_port(port, ())


def test_other_ray_names_both_ways_out(taken_port: int) -> None:
    with pytest.raises(LaunchError, match=r"ray stop.*serve deploy ray_config\.yaml"):
        check_no_other_ray((taken_port,), ())


def test_full_disk_names_what_to_free(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="MANTA_STATE_DIR"):
        check_disk(tmp_path / "not" / "made" / "yet", needed_bytes=10**18)
    check_disk(tmp_path, needed_bytes=1)


def test_port_argument_wins_over_the_file(tmp_path: Path) -> None:
    path = config_file(tmp_path, "http_options: {port: 9000}\napplications: []")
    assert read_serve_config(path, None)["http_options"]["port"] == 9000
    assert read_serve_config(path, 8001)["http_options"]["port"] == 8001
    assert read_serve_config(config_file(tmp_path, "applications: []"), None)["http_options"]["port"] == 8000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot be read"),
        ("just text", "is not a Serve config"),
        ("applications: {}", "is not a Serve config"),
        ("http_options: 5\napplications: []", "http_options must be a mapping"),
        ("http_options: {port: 99999}\napplications: []", r"http_options\.port must be from 1 to 65535"),
    ],
)
def test_unusable_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message) as error:
        read_serve_config(config_file(tmp_path, text), None)
    assert "\n" not in str(error.value)


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="does not exist"):
        read_serve_config(tmp_path / "none.yaml", None)


def test_only_our_own_applications_are_checked() -> None:
    other = {"name": "x", "import_path": "other:app", "args": {"anything": 1}}
    ours = {"name": "y", "import_path": "cluster.app:build", "args": {"models": [{"name": "a"}]}}
    assert [model.name for cluster in check_applications({"applications": [other, ours]}) for model in cluster.models] == ["a"]
    with pytest.raises(LaunchError, match="unknown key"):
        check_applications({"applications": [{**ours, "args": {"modells": []}}]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"http_option": {}}, "http_option: unknown key; did you mean 'http_options'"),
        ({"http_options": {"prot": 8000}}, r"http_options\.prot: unknown key; did you mean 'port'"),
        ({"logging_config": {"log_level": "INFO", "colour": 1}}, r"logging_config\.colour: unknown key; known keys are .*log_level"),
        (
            {"applications": [{"import_path": "x:y", "route_prefx": "/"}]},
            r"applications\[0\]\.route_prefx: unknown key; did you mean 'route_prefix'",
        ),
        (
            {"applications": [{"import_path": "x:y", "deployments": [{"name": "a"}, {"name": "b", "num_replica": 2}]}]},
            r"applications\[0\]\.deployments\[1\]\.num_replica: unknown key; did you mean 'num_replicas'",
        ),
        (
            {"applications": [{"import_path": "x:y", "deployments": [{"name": "a", "ray_actor_options": {"num_cpu": 2}}]}]},
            r"ray_actor_options\.num_cpu: unknown key; did you mean 'num_cpus'",
        ),
    ],
)
def test_key_that_serve_would_ignore_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message) as error:
        check_serve_keys(change)
    assert "\n" not in str(error.value)


def test_keys_of_the_shipped_config_and_free_ones_pass() -> None:
    check_serve_keys(read_serve_config(Path("ray_config.yaml"), None))
    deployment = {"name": "a", "user_config": {"any": 1}, "autoscaling_config": {"max_replicas": 2}, "num_replicas": "auto"}
    application = {
        "import_path": "x:y",
        "args": {"any": {"thing": 1}},
        "runtime_env": {"env_vars": {"A": "1"}},
        "deployments": [deployment],
    }
    check_serve_keys({"proxy_location": "HeadOnly", "http_options": {"port": 1}, "applications": [application, "not a mapping"]})


def test_printed_curl_holds_valid_json() -> None:
    command = next(line for line in success_message(8001, "it's").splitlines() if line.startswith("curl "))
    assert json.loads(shlex.split(command)[-1])["model"] == "it's"


def test_failure_is_the_deepest_cause_in_one_line_and_keeps_the_rest() -> None:
    trace = "Traceback (most recent call last):\n  File x\nray::X.init() (pid=1)\nRuntimeError: outer\nValueError: raise kv_cache_bytes\n"
    progress = DeployProgress(statuses={"manta": "DEPLOY_FAILED"}, replicas={}, waits={}, failures={"manta": "failed", "replica-a": trace})
    assert progress.has_failed
    error = DeployFailed(progress)
    assert str(error) == "raise kv_cache_bytes"
    assert trace.strip() in error.details
    assert "[manta] failed" in error.details


@pytest.mark.parametrize(
    ("details", "cause"),
    [
        ("[manta] Deploying app 'manta' failed with exception:\nargs: modls: unknown key\n", "args: modls: unknown key"),
        ("[a] no such import path", "[a] no such import path"),
        ("", "Serve gives no reason"),
    ],
)
def test_cause_without_an_error_line_is_the_last_line(details: str, cause: str) -> None:
    assert cause_of(details) == cause


CONSTRUCTOR_FAILED = """A replica failed to start with exception. Retrying 1 more time(s). Error:
Traceback (most recent call last):
  File "x.py", line 1
ray::ServeReplica:manta:replica-a.initialize_and_get_metadata() (pid=7)
RuntimeError: Traceback (most recent call last):
ValueError: kv_cache_bytes must be at least 5
"""
PROCESS_DIED = """A replica failed to start with exception. Retrying 1 more time(s). Error:
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
"""


@pytest.mark.parametrize(
    ("status", "message", "fails"),
    [
        ("UPDATING", CONSTRUCTOR_FAILED, True),
        ("UPDATING", PROCESS_DIED, False),
        ("UPDATING", "Deployment 'a' has 1 replicas that have taken more than 30s to initialize.", False),
        ("DEPLOY_FAILED", PROCESS_DIED, True),
        ("UPDATING", "", False),
    ],
)
def test_first_error_of_a_constructor_ends_the_wait(monkeypatch: pytest.MonkeyPatch, status: str, message: str, fails: bool) -> None:
    application = {"status": "DEPLOYING", "deployments": {"replica-a": {"status": status, "message": message}}}
    rest = ServeRest("http://127.0.0.1:1", {})
    monkeypatch.setattr(rest, "_call", lambda method, body=None: {"applications": {"manta": application}})
    assert rest.progress().has_failed is fails
    if fails:
        with pytest.raises(DeployFailed) as error:
            rest.wait_running(5.0, lambda progress: None)
        assert str(error.value).startswith(("kv_cache_bytes must be", "The actor died"))


NO_ROOM = (
    "Deployment 'replica-a' in application 'manta' has 1 replicas that have taken more than 30s to be scheduled. This may be due to "
    "waiting for the cluster to auto-scale or for a runtime environment to be installed. Resources required for each replica: "
    '{"CPU": 0.5}, total resources available: {"CPU": 0.2}. Use `ray status` for more details.'
)


def test_replica_that_finds_no_room_is_told_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    application = {"status": "DEPLOYING", "deployments": {"replica-a": {"status": "UPDATING", "message": NO_ROOM}}}
    rest = ServeRest("http://127.0.0.1:1", {})
    monkeypatch.setattr(rest, "_call", lambda method, body=None: {"applications": {"manta": application}})
    progress = rest.progress()
    assert not progress.has_failed
    assert progress.waits == {"replica-a": 'no machine has room for another replica: it needs {"CPU": 0.5}, free in all are {"CPU": 0.2}'}
    with pytest.raises(LaunchError, match=r"not running after 0 s \(replica-a: .*it needs.*\); it goes on trying"):
        rest.wait_running(0.0, lambda progress: None)


BEFORE_S, AFTER_S = 900.0, 1100.0  # it is deployed at 1000


def look(status: str, deployment_status: str | None, message: str = "", **replicas: Any) -> dict[str, Any]:
    """Serve's view of the application `manta`; without a deployment while it is built."""
    details = {"status": deployment_status, "message": message, **replicas}
    return {"status": status, "message": "", "deployments": {} if deployment_status is None else {"replica-a": details}}


def seventh(start_time_s: float) -> list[dict[str, Any]]:
    """The replica of whose failure CONSTRUCTOR_FAILED tells."""
    return [{"pid": 7, "state": "STOPPING", "start_time_s": start_time_s}, {"pid": None, "state": "STARTING", "start_time_s": AFTER_S}]


BUILDS = look("DEPLOYING", None)
STARTS = look("DEPLOYING", "UPDATING")
RUNS = look("RUNNING", "HEALTHY")


def wait(monkeypatch: pytest.MonkeyPatch, *looks: dict[str, Any]) -> None:
    rest, left, now_s = ServeRest("http://127.0.0.1:1", {}), list(looks), iter(range(1000, 1100))
    monkeypatch.setattr(rest, "_call", lambda method, body=None: {"applications": {"manta": left.pop(0)}})
    monkeypatch.setattr(serve_rest, "time", SimpleNamespace(monotonic=lambda: 0.0, time=lambda: next(now_s), sleep=lambda seconds: None))
    rest.wait_running(60.0, lambda progress: None)
    assert left == []


@pytest.mark.parametrize(
    "looks",
    [
        [look("DEPLOYING", "UPDATING", CONSTRUCTOR_FAILED, replicas=seventh(BEFORE_S))],
        [look("DEPLOYING", "UPDATING", CONSTRUCTOR_FAILED, recent_dead_replicas=seventh(BEFORE_S))],
        [
            BUILDS,
            STARTS,
            look("DEPLOYING", "UPDATING", CONSTRUCTOR_FAILED, replicas=seventh(1000.5)),
        ],  # an older version's while it was built
    ],
)
def test_failure_of_a_replica_of_what_is_replaced_does_not_count(monkeypatch: pytest.MonkeyPatch, looks: list[dict[str, Any]]) -> None:
    wait(monkeypatch, *looks, RUNS)


@pytest.mark.parametrize(
    "looks",
    [
        [BUILDS, STARTS, look("DEPLOYING", "UPDATING", CONSTRUCTOR_FAILED, replicas=seventh(AFTER_S))],
        [BUILDS, STARTS, look("DEPLOYING", "UPDATING", CONSTRUCTOR_FAILED, recent_dead_replicas=seventh(AFTER_S))],
        [BUILDS, look("DEPLOYING", "UPDATING", CONSTRUCTOR_FAILED)],
        [look("DEPLOY_FAILED", "DEPLOY_FAILED", CONSTRUCTOR_FAILED, replicas=seventh(BEFORE_S))],  # Serve does not try the same again
    ],
)
def test_failure_of_what_was_deployed_counts(monkeypatch: pytest.MonkeyPatch, looks: list[dict[str, Any]]) -> None:
    with pytest.raises(DeployFailed, match="kv_cache_bytes must be at least 5"):
        wait(monkeypatch, *looks)


def test_failed_build_is_told_by_its_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "Deploying app 'manta' failed with exception:\nargs: models[0] (a): no such model"
    with pytest.raises(DeployFailed, match=r"^args: models\[0\] \(a\): no such model$"):
        wait(monkeypatch, BUILDS, {**look("DEPLOY_FAILED", None), "message": message})


def test_deploy_is_given_the_time_in_which_serve_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s = {}

    def urlopen(request: urllib.request.Request, timeout: float) -> io.BytesIO:
        waits_s[request.get_method()] = timeout
        return io.BytesIO(b"{}")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    rest = ServeRest("http://127.0.0.1:1", {})
    rest.deploy({"applications": []})
    rest.progress()
    assert waits_s["PUT"] >= 120 > waits_s["GET"]
    rest.http_port()
    assert waits_s["GET"] <= 5, "a Ray whose dashboard hangs is found out soon"


def test_token_comes_from_variable_then_file(tmp_path: Path) -> None:
    assert auth_headers({}, tmp_path) == {}
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("filed\n")
    assert auth_headers({}, tmp_path) == {"Authorization": "Bearer filed"}
    assert auth_headers({"RAY_AUTH_TOKEN": "given"}, tmp_path) == {"Authorization": "Bearer given"}


def test_remembered_pid_of_another_process_is_never_touched(tmp_path: Path) -> None:
    head = RayHead(tmp_path, {})
    assert not head.stop()
    (tmp_path / "ray.json").write_text(json.dumps({"pid": os.getpid(), "create_time": 1.0}))
    assert head.pids() == set()
    assert not head.stop()
    (tmp_path / "ray.json").write_text("{cut off")
    assert not head.is_running


@pytest.mark.parametrize(("parts", "is_whole"), [(("gcs_server", "raylet"), True), (("gcs_server",), False)])
def test_ray_that_has_lost_its_raylet_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: tuple[str, ...], is_whole: bool
) -> None:
    """Stand-ins: one process for the head, below it one for each part, named as Ray names it."""
    for part in parts:
        (tmp_path / part).symlink_to("/bin/sleep")
    started = "; ".join(f"children.append(subprocess.Popen(['{tmp_path / part}', '60']))" for part in parts)
    program = f"import subprocess, sys; children = []; {started}; print('up', flush=True); sys.stdin.read(); [c.kill() for c in children]"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as head:
        assert head.stdin is not None
        assert head.stdout is not None
        head.stdout.readline()
        create_time = psutil.Process(head.pid).create_time()
        (tmp_path / "ray.json").write_text(json.dumps({"pid": head.pid, "create_time": create_time}))
        monkeypatch.setattr(ray_head, "is_listening", lambda port: True)
        assert RayHead(tmp_path, {}).is_running is is_whole
        head.stdin.close()


@pytest.mark.parametrize(("hides", "shows"), [("hide_bars(os.environ)", False), ("", True)])
def test_bars_of_hub_and_transformers_stay_out_of_a_pipe(hides: str, shows: bool) -> None:
    program = (
        "import os\nfrom cluster.local.__main__ import hide_bars\n"
        f"{hides}\n"
        "from tqdm.auto import tqdm\nfrom huggingface_hub.utils import tqdm as hub\n"
        "for bar in (tqdm, hub):\n    list(bar(range(3)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ("it/s" in done.stderr) is shows


def test_printed_environment_finds_the_packages_and_a_token_that_it_makes(tmp_path: Path) -> None:
    """From any folder, by a user without a token."""
    repo = Path(__file__).resolve().parents[2]
    script = f"""cd {repo} && eval "$({sys.executable} -m cluster.local environment)" && cd / && {sys.executable} -c \
        'import os, cluster; print(os.environ["RAY_AUTH_MODE"], len(open(os.path.expanduser("~/.ray/auth_token")).read()))'"""
    inherited = {name: value for name, value in os.environ.items() if name not in ray_head.RAY_ENVIRONMENT}
    done = subprocess.run(
        ["bash", "-c", script], env={**inherited, "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    mode, length = done.stdout.split()
    assert mode == "token"
    assert int(length) >= 32
