"""One engine in its own process, driven over a pipe: the peer that tests kill, stop and restart."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.handoff.wiring import RemoteWiring

STEP_TOKENS = 8


def load_peer(folder: Path, role: Any, *, lease_s: float, deadline_s: float) -> Engine:
    """An engine that computes few tokens a step, so that a prefill takes many."""
    config = EngineConfig(
        model=str(folder), dtype="float32", runner="native", role=role, max_model_len=128, max_num_seqs=4, block_size=8,
        max_num_batched_tokens=STEP_TOKENS, kv_cache_bytes=1 << 20, num_threads=1, kv_lease_s=lease_s,
    )  # fmt: skip
    return load_engine(config, RemoteWiring(deadline_s=deadline_s))


def serve(pipe: Connection, folder: Path, role: Any, step_s: float, lease_s: float, deadline_s: float) -> None:
    """Takes requests from the pipe and says what becomes of them, a step each `step_s`; None ends it."""
    engine = load_peer(folder, role, lease_s=lease_s, deadline_s=deadline_s)
    pipe.send("ready")
    while True:
        if pipe.poll(None if not engine.has_work else 0):
            request = pipe.recv()
            if request is None:
                engine.close()
                return
            engine.add_request(request)
        for progress in engine.step().progress:
            pipe.send(progress)
        time.sleep(step_s)
