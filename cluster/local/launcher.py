"""`make serve` and `make stop`: from nothing to a served model on this machine, and back."""

from __future__ import annotations

import json
import logging
import shlex
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from cluster.local.preflight import LaunchError, check_disk, check_http_port, check_no_other_ray
from cluster.local.ray_head import DASHBOARD_PORT, GCS_PORT, RayHead
from cluster.local.room import check_room, machine_resources
from cluster.local.serve_keys import check_serve_keys
from cluster.local.serve_rest import DeployFailed, DeployProgress, ServeRest, auth_headers
from cluster.settings.config import ClusterConfig, ConfigError, Environment, read_config
from replicas.model.default_model import DefaultModelError, prepare_default_model

logger = logging.getLogger(__name__)

IMPORT_PATH = "cluster.app:build"
DEFAULT_HTTP_PORT = 8000
RUNNING_TIMEOUT_S = 600.0
HEALTH_TIMEOUT_S = 60.0
RESTART_TIMEOUT_S = 60.0


class Launcher:
    """Brings one Serve config up on a Ray of its own. Running it again changes only what differs."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._error_file = environment.state_dir / "deploy-error.log"
        self._ray = RayHead(environment.state_dir, environment.inherited)
        self._serve = ServeRest(f"http://127.0.0.1:{DASHBOARD_PORT}", auth_headers(environment.inherited, Path.home()))

    def serve(self, config_path: Path, port: int | None, timeout_s: float) -> None:
        """Returns when the models answer. Raises LaunchError, also when the deployment does not run after `timeout_s`."""
        config = read_serve_config(config_path, port)
        clusters = check_applications(config)
        check_serve_keys(config)
        check_room(config, clusters, machine_resources())
        for caution in (caution for cluster in clusters for caution in cluster.gateway.priorities.cautions):
            logger.info("%s", caution)
        http_port = config["http_options"]["port"]
        check_disk(self._environment.state_dir)
        own_pids = self._ray.pids()
        check_no_other_ray((GCS_PORT, DASHBOARD_PORT), own_pids)
        check_http_port(http_port, own_pids)
        if any(model.engine.model is None for cluster in clusters for model in cluster.models):
            self._prepare_default_model()
        self._start_ray(http_port)
        logger.info("deploying %s", config_path)
        self._serve.deploy(config)
        try:
            self._serve.wait_running(timeout_s, _show)
        except DeployFailed as error:
            self._error_file.write_text(error.details)
            raise LaunchError(f"{error} (all that Serve says: {self._error_file})") from error
        self._wait_healthy(http_port)
        model = clusters[0].models[0].name if clusters else "MODEL"
        logger.info("%s", success_message(http_port, model))

    def stop(self) -> None:
        """Ends what `serve` started; nothing else."""
        logger.info("stopped" if self._ray.stop() else "nothing to stop")

    def _prepare_default_model(self) -> None:
        logger.info("preparing the default model")
        try:
            prepare_default_model()
        except DefaultModelError as error:
            raise LaunchError(str(error)) from error

    def _start_ray(self, http_port: int) -> None:
        """Uses our running Ray if there is one. Serve fixes its port when it starts, so another port restarts Serve."""
        if not self._ray.is_running:
            logger.info("starting Ray (log: %s)", self._ray.log_file)
            self._ray.start()
            return
        logger.info("using the Ray that runs already")
        running_port = self._serve.http_port()
        if running_port is None or running_port == http_port:
            return
        logger.info("moving from port %d to port %d", running_port, http_port)
        self._serve.shutdown()
        deadline_s = time.monotonic() + RESTART_TIMEOUT_S
        while self._serve.http_port() is not None:
            if time.monotonic() > deadline_s:
                raise LaunchError("Serve did not shut down: run make stop, then make serve")
            time.sleep(0.5)

    def _wait_healthy(self, port: int) -> None:
        deadline_s = time.monotonic() + HEALTH_TIMEOUT_S
        url = f"http://127.0.0.1:{port}/health"
        while True:
            try:
                with urllib.request.urlopen(url, timeout=5.0):
                    return
            except urllib.error.HTTPError as error:  # 503 while a model cannot serve
                reason = error.read().decode(errors="replace")
            except OSError as error:
                reason = str(error)
            if time.monotonic() > deadline_s:
                raise LaunchError(f"{url} is not healthy after {HEALTH_TIMEOUT_S:.0f} s ({reason}); see http://127.0.0.1:8265/#/serve")
            time.sleep(0.3)


def read_serve_config(path: Path, port: int | None) -> dict[str, Any]:
    """The Serve config with its port settled: the one asked for, else the file's, else 8000. Raises LaunchError."""
    try:
        config = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise LaunchError(f"{path} does not exist: give an existing Serve config with make serve CONFIG=file.yaml") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LaunchError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict) or not isinstance(config.get("applications"), list):
        raise LaunchError(f"{path} is not a Serve config: it needs a list `applications`; see ray_config.yaml")
    options = config.setdefault("http_options", {})
    if not isinstance(options, dict):
        raise LaunchError(f"{path}: http_options must be a mapping with host and port")
    options["port"] = port or options.get("port", DEFAULT_HTTP_PORT)
    if not isinstance(options["port"], int) or not 0 < options["port"] < 65_536:
        raise LaunchError(f"{path}: http_options.port must be from 1 to 65535, got {options['port']!r}")
    return config


def check_applications(config: dict[str, Any]) -> list[ClusterConfig]:
    """Our applications' args, checked before anything starts. Raises LaunchError in the words of ConfigError."""
    clusters = []
    for application in config["applications"]:
        if isinstance(application, dict) and application.get("import_path") == IMPORT_PATH:
            try:
                clusters.append(read_config(application.get("args") or {}))
            except ConfigError as error:
                raise LaunchError(str(error)) from error
    return clusters


def success_message(port: int, model: str) -> str:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = shlex.quote(json.dumps({"model": model, "messages": messages, "temperature": 0}))
    return (
        f"\nready at http://127.0.0.1:{port}/v1 (dashboard: http://127.0.0.1:{DASHBOARD_PORT}). Try:\n\n"
        f"curl http://127.0.0.1:{port}/v1/chat/completions -H 'Content-Type: application/json' -d {body}\n\n"
        "make stop ends it."
    )


def _show(progress: DeployProgress) -> None:
    states = "; ".join(f"{name}: {state}" for name, state in progress.replicas.items())
    logger.info("  %s%s", ", ".join(progress.statuses.values()).lower() or "waiting for Serve", f" ({states})" if states else "")
    for name, lack in progress.waits.items():
        logger.info("  %s waits: %s; make stop, or ask for less", name, lack)
