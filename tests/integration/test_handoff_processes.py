"""Handoffs between processes whose peer is killed, stopped or restarted in the middle."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from replicas.engine.engine import Engine
from replicas.handoff.handoffs import Handoffs
from replicas.request import FinishReason, GenerationRequest, RequestProgress
from replicas.sampling_params import SamplingParams
from tests import handoff_peer
from tests.engine_harness import requests_for
from tests.tiny_llama import generated_by_transformers, save_tiny_llama, shared_prompts

NUM_ROUNDS, NUM_OUTPUT = 10, 6
LEASE_S, DEADLINE_S, STEP_S = 0.5, 1.0, 0.01
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
PATIENCE_S = 60.0

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.handoff_peer"])

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [prompt for prompt in shared_prompts(30) if len(prompt) > 80][: NUM_ROUNDS + 2]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return generated_by_transformers(folder, prompts, NUM_OUTPUT)


@contextmanager
def _peer(folder: Path, role: str) -> Iterator[tuple[Any, Connection]]:
    """A process and the pipe to it; whatever is left of it at the end is killed."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=handoff_peer.serve, args=(theirs, folder, role, STEP_S, LEASE_S, DEADLINE_S), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(PATIENCE_S), "the peer did not start"
        assert ours.recv() == "ready"
        yield process, ours
    finally:
        process.kill()
        process.join(PATIENCE_S)
        ours.close()


@pytest.fixture(params=["prefill", "decode"])
def survivor(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    engine = handoff_peer.load_peer(folder, request.param, lease_s=LEASE_S, deadline_s=DEADLINE_S)
    yield engine
    engine.close()


def _receive_offer(pipe: Connection) -> RequestProgress:
    while pipe.poll(PATIENCE_S):
        progress = pipe.recv()
        if progress.handoff is not None:
            return progress
    raise AssertionError("no offer came")


def _run_to_end(engine: Engine, *, at_step: dict[int, Any] | None = None) -> tuple[list[int], FinishReason | None, float]:
    """Steps until nothing is left; the tokens, how it ended, and how long blocks stayed taken after the end."""
    tokens: list[int] = []
    reason, ended_s = None, time.monotonic()
    until_s = time.monotonic() + PATIENCE_S
    number = 0
    while engine.has_work:
        assert time.monotonic() < until_s, "the survivor hangs"
        for item in engine.step().progress:
            tokens += item.token_ids
            if item.finish_reason is not None:
                reason, ended_s = item.finish_reason, time.monotonic()
        engine.check()
        number += 1
        if at_step and number in at_step:
            at_step[number]()
    return tokens, reason, time.monotonic() - ended_s


def _assert_all_free(engine: Engine) -> None:
    pool = engine.scheduler.pool
    assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("survivor", ["decode"], indirect=True)
def test_killed_prefill_process_leaves_decode_to_recompute(
    folder: Path, survivor: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    for number in range(NUM_ROUNDS):
        with _peer(folder, "prefill") as (process, pipe):
            (request,) = requests_for([prompts[number]], GREEDY, prefix=f"{number}-")
            pipe.send(replace(request, wants_handoff=True))
            survivor.add_request(replace(request, handoff=_receive_offer(pipe).handoff))
            kill = {1 + 2 * number: process.kill}  # each round a little later
            tokens, reason, held_s = _run_to_end(survivor, at_step=kill)
        assert (tokens, reason) == (expected[number], FinishReason.LENGTH)
        assert held_s < LEASE_S + DEADLINE_S
        _assert_all_free(survivor)
    assert isinstance(survivor.handoffs, Handoffs)
    assert survivor.handoffs.counters.num_recomputed >= NUM_ROUNDS // 2, "most kills were meant to hit a transfer"


@pytest.mark.parametrize("survivor", ["prefill"], indirect=True)
def test_killed_decode_process_costs_prefill_its_blocks_for_one_lease(
    folder: Path, survivor: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert isinstance(survivor.handoffs, Handoffs)
    ownership = survivor.handoffs.ownership
    for number in range(NUM_ROUNDS):
        with _peer(folder, "decode") as (process, pipe):
            (request,) = requests_for([prompts[number]], GREEDY, prefix=f"{number}-")
            survivor.add_request(replace(request, wants_handoff=True))
            offers = [item for item in survivor.step().progress if item.handoff is not None]
            pipe.send(replace(request, handoff=offers[0].handoff))
            time.sleep(STEP_S * 2)
            tokens, reason, held_s = _run_to_end(survivor, at_step={1 + number: process.kill})
        assert (tokens, reason) == (expected[number][:1], FinishReason.HANDOFF)
        assert held_s < LEASE_S + 0.5, "the lease did not end in time"
        _assert_all_free(survivor)
    assert ownership.counters.num_expired >= NUM_ROUNDS // 2, "most kills were meant to hit a transfer"


@pytest.mark.parametrize("survivor", ["decode"], indirect=True)
def test_stopped_prefill_process_is_given_up_at_the_deadline_and_fenced_when_it_wakes(
    folder: Path, survivor: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with _peer(folder, "prefill") as (process, pipe):
        (request,) = requests_for([prompts[0]], GREEDY)
        pipe.send(replace(request, wants_handoff=True))
        survivor.add_request(replace(request, handoff=_receive_offer(pipe).handoff))
        os.kill(process.pid, signal.SIGSTOP)
        tokens, reason, _ = _run_to_end(survivor)
        assert (tokens, reason) == (expected[0], FinishReason.LENGTH)
        _assert_all_free(survivor)
        os.kill(process.pid, signal.SIGCONT)
        # It lives on: the next request goes through it as if nothing had been.
        (request,) = requests_for([prompts[1]], GREEDY, prefix="next")
        pipe.send(replace(request, wants_handoff=True))
        survivor.add_request(replace(request, handoff=_receive_offer(pipe).handoff))
        assert _run_to_end(survivor)[0] == expected[1]
    assert isinstance(survivor.handoffs, Handoffs)
    assert survivor.handoffs.counters.num_loaded == 1


@pytest.mark.parametrize("survivor", ["decode"], indirect=True)
def test_restarted_prefill_process_does_not_answer_for_its_older_self(
    folder: Path, survivor: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    (request,) = requests_for([prompts[0]], GREEDY)
    with _peer(folder, "prefill") as (_, pipe):
        pipe.send(replace(request, wants_handoff=True))
        old = _receive_offer(pipe).handoff
    with _peer(folder, "prefill") as (_, pipe):
        (other,) = requests_for([prompts[1]], GREEDY, prefix="other")
        pipe.send(replace(other, wants_handoff=True))
        new = _receive_offer(pipe).handoff
        assert (old.lease, old.epoch < new.epoch) == (new.lease, True), "the new life counts its leases from the start"
        stale: GenerationRequest = replace(request, handoff=replace(old, shares=new.shares))
        survivor.add_request(stale)
        assert _run_to_end(survivor)[0] == expected[0]
    assert isinstance(survivor.handoffs, Handoffs)
    assert (survivor.handoffs.counters.num_loaded, survivor.handoffs.counters.num_recomputed) == (0, 1)
