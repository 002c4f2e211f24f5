"""Deploys through Serve's REST API and waits for what came of it (`serve deploy` alone exits 0 on a failed build)."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.local.preflight import LaunchError

REQUEST_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 5.0
"""For a first look at a Ray that runs already: a dashboard that is well answers in milliseconds."""
DEPLOY_TIMEOUT_S = 180.0
"""The first one starts Serve itself: seconds, or a minute on a machine that is busy."""
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
_FIRST_FAILURE = "failed to start with exception"  # Serve's words, in a deployment's message while it tries again
_DEATHS = ("ActorDiedError", "ActorUnavailableError", "RayActorError", "WorkerCrashedError", "NodeDiedError", "OutOfMemoryError")
_LACK = re.compile(r"to be scheduled\..*Resources required for each replica: (.*?), total resources available: (.*?)\. ", re.DOTALL)
_PID = re.compile(r"\(pid=(\d+)")
_ERROR_LINE = re.compile(r"^\s*(?:ray::\S+ .*?)?((?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Model|Unhealthy)?): (.+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployProgress:
    """One look at the applications."""

    statuses: Mapping[str, str]
    """Application -> status."""
    replicas: Mapping[str, str]
    """Deployment -> its replicas' states, for people."""
    failures: Mapping[str, str]
    """Application or deployment -> message, of those that failed, or whose replica could not be made: Serve tries that again, and
    reports the same once more a minute later."""
    waits: Mapping[str, str]
    """Deployment -> what its replicas lack, of those that no machine has room for."""

    @property
    def is_running(self) -> bool:
        return bool(self.statuses) and all(status == "RUNNING" for status in self.statuses.values())

    @property
    def has_failed(self) -> bool:
        return bool(self.failures) or any(status in _FAILED for status in self.statuses.values())

    @property
    def is_built(self) -> bool:
        """Serve shows no deployments while their application is built; what runs of an older version goes on meanwhile."""
        return bool(self.replicas)


class DeployFailed(LaunchError):
    """Serve could not bring up what was deployed. The message is one line; `details` is all that Serve told."""

    def __init__(self, progress: DeployProgress) -> None:
        self.details = "\n".join(f"[{name}] {message}" for name, message in progress.failures.items())
        super().__init__(cause_of(self.details))


class ServeRest:
    """Talks to the dashboard of one Ray."""

    def __init__(self, dashboard_url: str, headers: Mapping[str, str]) -> None:
        """`headers` go with every call; see `auth_headers`."""
        self._url = f"{dashboard_url}/api/serve/applications/"
        self._headers = {**headers, "Content-Type": "application/json"}

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Declares what should run. Raises LaunchError when Serve refuses the file itself."""
        self._call("PUT", config, DEPLOY_TIMEOUT_S)

    def shutdown(self) -> None:
        """Ends every application and Serve's own actors."""
        self._call("DELETE")

    def http_port(self) -> int | None:
        """The port of the running Serve; None when none runs."""
        options = self._call("GET", timeout_s=PROBE_TIMEOUT_S).get("http_options") or {}
        port = options.get("port")
        return port if isinstance(port, int) else None

    def progress(self, since_s: float = 0.0) -> DeployProgress:
        """Failures of replicas that started before `since_s` (Unix time) are left out, unless their application has failed as a whole."""
        applications = self._call("GET").get("applications") or {}
        statuses, replicas, failures, waits = {}, {}, {}, {}
        for name, application in applications.items():
            statuses[name] = application["status"]
            if application["status"] in _FAILED and application.get("message"):
                failures[name] = application["message"]
            for deployment, details in (application.get("deployments") or {}).items():
                states = [replica["state"] for replica in details.get("replicas") or ()]
                replicas[deployment] = ", ".join(f"{states.count(state)} {state.lower()}" for state in sorted(set(states))) or "waiting"
                message = details.get("message")
                has_failed = details["status"] in _FAILED or is_wrong_for_good(message or "")
                if message and has_failed and (application["status"] in _FAILED or not _is_older(details, since_s)):
                    failures[deployment] = message
                if message and (lack := _LACK.search(message)):
                    waits[deployment] = f"no machine has room for another replica: it needs {lack[1]}, free in all are {lack[2]}"
        return DeployProgress(statuses=statuses, replicas=replicas, failures=failures, waits=waits)

    def wait_running(self, timeout_s: float, on_change: Callable[[DeployProgress], None]) -> None:
        """Returns when every application runs. Raises DeployFailed with the builder's or the replica's own error, and LaunchError
        after `timeout_s`. Replicas of what is replaced may still fail meanwhile, which does not count."""
        deadline_s = time.monotonic() + timeout_s
        since_s = time.time()
        last: DeployProgress | None = None
        while True:
            look_s = time.time()
            progress = self.progress(since_s)
            if not progress.is_built:
                since_s = look_s
            if progress != last:
                on_change(progress)
                last = progress
            if progress.is_running:
                return
            if progress.has_failed:
                raise DeployFailed(progress)
            if time.monotonic() > deadline_s:
                states = progress.waits or progress.replicas or {"the application": "still being built, which proves its configuration"}
                reasons = "; ".join(f"{name}: {state}" for name, state in states.items())
                raise LaunchError(
                    f"not running after {timeout_s:.0f} s ({reasons}); it goes on trying: see http://127.0.0.1:8265/#/serve, or make stop"
                )
            time.sleep(0.5)

    def _call(self, method: str, body: Mapping[str, Any] | None = None, timeout_s: float = REQUEST_TIMEOUT_S) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url, data=data, method=method, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            reason = error.read().decode(errors="replace").strip()
            raise LaunchError(f"Serve refused the configuration: {reason}") from error
        except OSError as error:
            raise LaunchError(f"Ray's dashboard does not answer at {self._url}: {error}; run make stop, then make serve") from error
        return json.loads(text) if method == "GET" else {}


def auth_headers(variables: Mapping[str, str], home: Path) -> dict[str, str]:
    """Ray asks for a token on every call once one was ever made for this user; it looks for it in these places, in this order."""
    token = variables.get("RAY_AUTH_TOKEN", "").strip()
    path = Path(variables.get("RAY_AUTH_TOKEN_PATH") or home / ".ray" / "auth_token").expanduser()
    if not token and path.is_file():
        token = path.read_text().strip()
    return {"Authorization": f"Bearer {token}"} if token else {}


def is_wrong_for_good(message: str) -> bool:
    """Whether a deployment's message tells of a constructor that raised, rather than of a process or a machine that died."""
    names = [match.group(1) or "" for line in message.splitlines() if (match := _ERROR_LINE.match(line))]
    return _FIRST_FAILURE in message and bool(names) and not any(name.endswith(_DEATHS) for name in names)


def _is_older(details: Mapping[str, Any], since_s: float) -> bool:
    """Whether the replica of which a deployment's message tells, by its process, started before `since_s`."""
    named = {int(pid) for pid in _PID.findall(details["message"])}
    known = [*(details.get("replicas") or ()), *(details.get("recent_dead_replicas") or ())]
    return any(replica.get("pid") in named and replica["start_time_s"] < since_s for replica in known)


def cause_of(details: str) -> str:
    """The last error line, which is that of the deepest failure and names the cause; the last line of a text without errors."""
    lines = [line.strip() for line in details.splitlines() if line.strip()]
    causes = [match.group(2).strip() for line in lines if (match := _ERROR_LINE.match(line))]
    return (causes or lines or ["Serve gives no reason"])[-1]
