"""Command line of `make serve` and `make stop`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from cluster.local.launcher import RUNNING_TIMEOUT_S, Launcher
from cluster.local.preflight import LaunchError
from cluster.local.shell_environment import shell_exports
from cluster.settings.config import ConfigError, read_environment


def hide_bars(variables: MutableMapping[str, str]) -> None:
    """Progress bars are for people who watch; a file or a pipe would get every one of their frames."""
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        variables.setdefault(name, "1")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.local", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="bring a Serve config up on this machine")
    serve.add_argument("--config", type=Path, default=Path("ray_config.yaml"))
    serve.add_argument("--port", type=int, default=None)
    serve.add_argument("--timeout", type=float, default=RUNNING_TIMEOUT_S, help="seconds until the deployment must run")
    commands.add_parser("stop", help="end what serve started")
    commands.add_parser("environment", help="print the variables for a Ray of your own, to be evaluated by a shell")
    arguments = parser.parse_args()
    if not sys.stderr.isatty():
        hide_bars(os.environ)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        if arguments.command == "environment":
            sys.stdout.write(shell_exports())
            return 0
        launcher = Launcher(read_environment())
        if arguments.command == "serve":
            launcher.serve(arguments.config, arguments.port, arguments.timeout)
        else:
            launcher.stop()
    except (LaunchError, ConfigError) as error:
        sys.stderr.write(f"make {arguments.command}: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; make stop ends what was started\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
