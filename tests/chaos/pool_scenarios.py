"""Faults of prefill and decode replicas, in each phase of their streams."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from tests.chaos.scenarios import Round, Scenario, Setting, finish, random_pid
from tests.chaos.served_cluster import REPLICA, Layout
from tests.chaos.streams import Load

LEASE_S = 4.0
LEASE_MARGIN_S = 6.0
"""Until a report shows what is free, and for a gateway to notice what it lost."""
NUM_PROMPT_REPEATS = 50
LAYOUT = Layout(
    pools={"prefill": 2, "decode": 2},
    # So few tokens a step that prefills take a while; so few a prompt that all of them fit.
    engine={"kv_lease_s": LEASE_S, "max_num_batched_tokens": 64},
    # A pair for every request; by seconds, an idle decode replica would compute prompts itself.
    router={"policy": "round_robin"},
)
MOMENTS = ("prefill", "transfer", "decode")


async def kill_prefill(setting: Setting) -> Round:
    """kill -9 of a random prefill replica: decode replicas compute what they lack."""
    return await _kill(setting, "prefill")


async def kill_decode(setting: Setting) -> Round:
    """kill -9 of a random decode replica: its streams go on elsewhere, and the KV that it was to get is given back."""
    return await _kill(setting, "decode")


async def leave(setting: Setting) -> Round:
    """Half of the clients hang up: nothing of theirs stays, and the others do not notice."""
    moment = setting.dice.choice(MOMENTS)
    found = Round(scenario=f"clients leave in {moment}")
    start_s = time.monotonic()
    async with setting.load() as load:
        await _wait_moment(setting, load, moment)
        harmed_s = time.monotonic()
        load.hang_up(setting.dice.sample(range(len(load.streams)), len(load.streams) // 2))
        await load.wait_ended()
    return await finish(found, setting, load, harmed_s, start_s, LEASE_S + LEASE_MARGIN_S)


POOL_SCENARIOS: dict[str, Scenario] = {"kill-prefill": kill_prefill, "kill-decode": kill_decode, "leave": leave}


async def _kill(setting: Setting, role: str) -> Round:
    moment = setting.dice.choice(MOMENTS)
    found = Round(scenario=f"kill a {role} replica in {moment}")
    start_s = time.monotonic()
    pid = await random_pid(setting, f"{REPLICA}-{role}")
    async with setting.load() as load:
        await _wait_moment(setting, load, moment)
        harmed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        await load.wait_ended()
    return await finish(found, setting, load, harmed_s, start_s, LEASE_S + LEASE_MARGIN_S)


async def _wait_moment(setting: Setting, load: Load, moment: str) -> None:
    """prefill: before the first token of all. transfer: while some have begun and others are still computed and pulled.
    decode: when most have begun. Not all: on a busy machine the first would have ended by then."""
    dice, num_streams = setting.dice, len(load.streams)
    if moment == "prefill":
        await asyncio.sleep(dice.uniform(0.05, 0.4))
        return
    await load.wait_begun(num_streams * 3 // 4 if moment == "decode" else dice.randrange(1, max(2, num_streams // 2)))
    await asyncio.sleep(dice.uniform(0.0, 0.2))
