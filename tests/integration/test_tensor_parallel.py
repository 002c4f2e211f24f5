"""Ranks as real processes of this machine: the default model divided, and what happens when one of them is killed or stopped."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from replicas.attention.step_tensors import StepTensors
from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig, ParallelConfig
from replicas.model.runner import StepResult
from replicas.ranks.ranks import RankLost
from replicas.sampling_params import SamplingParams
from replicas.text.tokenizer import Tokenizer
from tests.engine_harness import requests_for, run
from tests.prompts import mixed_prompts
from tests.rank_processes import rank_pids
from tests.tiny_models import save_tiny_model, tiny_prompts

logger = logging.getLogger(__name__)

NUM_OUTPUT = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
LOGITS_BOUND = 1e-4
"""Of the logits' standard deviation: float32 sums in another order."""
LOST_S = 10.0
"""Within which a killed rank must be noticed and every other one gone."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("same_torch_threads")]


def _load(folder: Path, size: int, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {
        "dtype": "float32", "max_num_seqs": 32, "max_num_batched_tokens": 256, "kv_cache_bytes": 256 << 20, "max_model_len": 1024,
    }  # fmt: skip
    return load_engine(EngineConfig(model=str(folder), tensor_parallel_size=size, **{**defaults, **settings}))


@dataclass(frozen=True)
class Answers:
    token_ids: list[list[int]]
    logits: list[torch.Tensor]
    """Of every step, in order."""


def _answers(engine: Engine, prompts: list[list[int]]) -> Answers:
    forward, logits = engine._runner.forward, []

    def recording(step: StepTensors) -> StepResult:
        result = forward(step)
        logits.append(result.logits_NV.clone())
        return result

    engine._runner.forward = recording  # type: ignore[method-assign]
    results = run(engine, requests_for(prompts, GREEDY))
    return Answers([result.token_ids for result in results], logits)


@pytest.fixture(scope="module")
def prompts(default_tokenizer: Tokenizer) -> list[list[int]]:
    return mixed_prompts(default_tokenizer)


@pytest.fixture(scope="module")
def whole(default_model_dir: Path, prompts: list[list[int]]) -> Answers:
    return _answers(_load(default_model_dir, 1), prompts)


@pytest.mark.parametrize("size", [2, 3])
def test_default_model_divided_gives_the_tokens_and_logits_of_one_rank(
    default_model_dir: Path, prompts: list[list[int]], whole: Answers, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="replicas")
    engine = _load(default_model_dir, size)
    try:
        divided = _answers(engine, prompts)
    finally:
        engine.close()
    assert len(prompts) == 20
    assert divided.token_ids == whole.token_ids
    num_steps = len(whole.logits)
    assert len(divided.logits) == num_steps
    worst = max(float((a - b).abs().max()) for a, b in zip(divided.logits, whole.logits, strict=True))
    deviation = float(torch.cat(whole.logits).std())
    assert worst <= LOGITS_BOUND * deviation
    shares = [record.args[1] for record in caplog.records if record.msg == "rank %d: %s"]  # type: ignore[index]
    logger.info("%d ranks: logits differ by at most %.1e, deviation %.1f; %s", size, worst, deviation, "; ".join(map(str, shares)))
    assert rank_pids() == []


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


TINY: dict[str, Any] = {"kv_cache_bytes": 1 << 20, "max_model_len": 128, "parallel": ParallelConfig(rank_deadline_s=3.0)}


def _wait_lost(ask: Callable[[], object]) -> tuple[str, float]:
    """Asks until the answer is that a rank is lost: why, and after how many seconds."""
    start_s = time.monotonic()
    while time.monotonic() < start_s + LOST_S:
        try:
            ask()
        except RankLost as lost:
            return str(lost), time.monotonic() - start_s
        time.sleep(0.001)
    raise AssertionError("the loss was not noticed")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_rank_killed_or_stopped_under_load_ends_the_engine_in_seconds_and_leaves_no_process(tiny: Path, end: int) -> None:
    engine = _load(tiny, 3, **TINY)
    pids = rank_pids()
    assert len(pids) == 2
    for request in requests_for(tiny_prompts(), SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)):
        engine.add_request(request)
    for _ in range(5):
        engine.step()
    os.kill(pids[0], end)
    reason, seconds = _wait_lost(engine.step)
    logger.info("%s, noticed after %.2f s", reason, seconds)
    assert reason.startswith("rank 1 has died" if end == signal.SIGKILL else "rank 1 hangs")
    with pytest.raises(RankLost):
        engine.check_ranks()
    engine.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_rank_killed_while_idle_is_noticed_without_a_step(tiny: Path) -> None:
    engine = _load(tiny, 2, **TINY)
    (pid,) = rank_pids()
    os.kill(pid, signal.SIGKILL)
    assert _wait_lost(engine.check_ranks)[0].startswith("rank 1 has died")
    engine.close()


LEADER = """
import json, sys, time
from replicas.engine.loader import load_engine
from replicas.model.runner import StepResult
from replicas.engine_config import EngineConfig
engine = load_engine(EngineConfig(**json.loads(sys.argv[1])))
print("ready", flush=True)
time.sleep(60)
"""


def test_rank_0_killed_leaves_no_other_rank(tiny: Path) -> None:
    config = {"model": str(tiny), "tensor_parallel_size": 3, "dtype": "float32", "kv_cache_bytes": 1 << 20, "max_num_batched_tokens": 64}
    with subprocess.Popen([sys.executable, "-c", LEADER, json.dumps(config)], stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        assert leader.stdout.readline() == "ready\n"
        pids = rank_pids(leader.pid)
        assert len(pids) == 2
        leader.kill()
        until_s = time.monotonic() + LOST_S
        while any(_is_running(pid) for pid in pids):
            assert time.monotonic() < until_s, "a rank outlived rank 0"
            time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
