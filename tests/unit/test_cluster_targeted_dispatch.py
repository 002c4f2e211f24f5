"""Targeted dispatch as Serve ships it to the processes that use it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ray.serve.config import RequestRouterConfig

from cluster.serve.targeted_dispatch import TargetedDispatch

# Runs in a process of its own, as the gateway does: only there does a class pickled by value become a copy.
SENDER = """
import asyncio, pickle, sys
from types import SimpleNamespace
from cluster.serve.serve_backend import TargetUnreachable
dispatch = object.__new__(pickle.load(sys.stdin.buffer))
request = SimpleNamespace(metadata=SimpleNamespace(session_id="gone"))
try:
    asyncio.run(dispatch._choose_replica_for_request(request, is_retry=True))
except TargetUnreachable as error:
    sys.stdout.write(str(error))
"""


def test_unreachable_target_raises_the_class_that_the_sender_catches() -> None:
    shipped = RequestRouterConfig(request_router_class=TargetedDispatch).get_serialized_request_router_cls()
    sender = subprocess.run(
        [sys.executable, "-c", SENDER], input=shipped, capture_output=True, cwd=Path(__file__).parents[2], timeout=60, check=False
    )
    assert sender.stdout.decode() == "replica gone turned the request away", sender.stderr.decode()
