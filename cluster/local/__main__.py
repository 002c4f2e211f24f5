"""Command line of `make serve` and `make stop`."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from cluster.local.launcher import Launcher
from cluster.local.preflight import LaunchError
from cluster.settings.config import ConfigError, read_environment


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.local", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="bring a Serve config up on this machine")
    serve.add_argument("--config", type=Path, default=Path("ray_config.yaml"))
    serve.add_argument("--port", type=int, default=None)
    commands.add_parser("stop", help="end what serve started")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        launcher = Launcher(read_environment())
        if arguments.command == "serve":
            launcher.serve(arguments.config, arguments.port)
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
