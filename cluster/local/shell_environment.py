"""The environment of `make serve` for a shell in which Ray is started by hand."""

from __future__ import annotations

import shlex
import subprocess
import sys

from cluster.local.preflight import LaunchError
from cluster.local.ray_head import RAY_ENVIRONMENT

_TOKEN_MODE = {"RAY_AUTH_MODE": "token"}


def shell_exports() -> str:
    """Lines for `eval`: what Ray's processes need, and Ray's own commands, which then find the user's token. Makes the token if there is
    none (~/.ray/auth_token). Raises LaunchError."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "get-auth-token", "--generate"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        lines = made.stderr.strip().splitlines() or ["it gave no reason"]
        raise LaunchError(f"Ray could not make its token: {lines[-1]}")
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in {**RAY_ENVIRONMENT, **_TOKEN_MODE}.items())
