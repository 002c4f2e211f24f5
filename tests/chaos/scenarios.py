"""Faults injected into a cluster while it streams, and the checks afterwards."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import httpx
import psutil

from tests.chaos.served_cluster import GATEWAY, MODEL, REPLICA, ROUTER, ServedCluster
from tests.chaos.streams import Load, Stream

CALLER_LEASE_S = 10.0  # RouterConfig.caller_lease_s
LEASE_MARGIN_S = 4.0


@dataclass(slots=True, kw_only=True)
class Round:
    """What one round of one scenario found."""

    scenario: str
    num_streams: int = 0
    num_broken_as_expected: int = 0
    faults: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    """Each whole stream's longest gap after the harm."""
    notes: dict[str, float] = field(default_factory=dict)
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything a scenario works with. Its golden streams are `num_streams` short and as many long ones."""

    cluster: ServedCluster
    dice: random.Random
    golden: Sequence[Stream]
    golden_long: Sequence[Stream]

    def load(self) -> Load:
        first = self.golden[0]
        return Load(self.cluster.url, len(self.golden), first.max_tokens, self.golden, first.num_prompt_repeats)

    def long_load(self) -> Load:
        return Load(self.cluster.url, len(self.golden_long), self.golden_long[0].max_tokens, self.golden_long)


Scenario = Callable[[Setting], Awaitable[Round]]


async def kill_replica(setting: Setting) -> Round:
    """kill -9 of a random replica: a pause, and nothing lost."""
    pid = await random_pid(setting, REPLICA)

    async def harm() -> None:
        os.kill(pid, signal.SIGKILL)

    return await _disturb("kill a replica", setting, setting.load(), harm)


async def hang_replica(setting: Setting) -> Round:
    """SIGSTOP of a random replica until all streams have ended: they end without it. Then it goes on, and holds nothing."""
    pid = await random_pid(setting, REPLICA)

    async def harm() -> None:
        os.kill(pid, signal.SIGSTOP)

    try:
        return await _disturb("hang a replica", setting, setting.load(), harm, heal=lambda: _signal(pid, signal.SIGCONT))
    finally:
        _signal(pid, signal.SIGCONT)


async def kill_router(setting: Setting) -> Round:
    """kill -9 of the router: running streams do not notice, new requests wait."""
    answers: list[asyncio.Task[int]] = []
    pid = await random_pid(setting, ROUTER)

    async def harm() -> None:
        os.kill(pid, signal.SIGKILL)
        answers.extend(asyncio.create_task(_short_answer(setting.cluster.url)) for _ in range(4))

    found = await _disturb("kill the router", setting, setting.load(), harm)
    statuses = await asyncio.gather(*answers)
    found.faults += [f"a request sent while the router was dead got {status}" for status in statuses if status != 200]
    return found


async def kill_router_and_replica(setting: Setting) -> Round:
    """Both at once: streams of the replica wait until there is a router again."""
    pids = [await random_pid(setting, ROUTER), await random_pid(setting, REPLICA)]

    async def harm() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    return await _disturb("kill router and replica", setting, setting.load(), harm)


async def kill_gateway(setting: Setting) -> Round:
    """kill -9 of a gateway: its own connections break, and what they ran is freed; those of the other go on."""
    found = Round(scenario="kill a gateway")
    start_s = time.monotonic()
    pid = await random_pid(setting, GATEWAY)
    async with setting.load() as load:
        await load.wait_begun()
        harmed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        freed_s: float | None = None
        while not load.is_ended:
            num_alive = sum(stream.error is None and stream.finish_reason is None for stream in load.streams)
            if freed_s is None and (await setting.cluster.num_running()) == num_alive:
                freed_s = time.monotonic() - harmed_s
            await asyncio.sleep(0.1)
    found.num_streams = len(load.streams)
    broken = [stream for stream in load.streams if stream.error is not None]
    found.num_broken_as_expected = len(broken)
    expected = {f"stream {stream.index} broke" for stream in broken}
    found.faults += [fault for fault in load.faults() if not any(fault.startswith(text) for text in expected)]
    if not 0 < len(broken) < len(load.streams):
        found.faults.append(f"{len(broken)} of {len(load.streams)} streams broke: the kill did not hit one of two gateways")
    await setting.cluster.wait_idle(CALLER_LEASE_S + LEASE_MARGIN_S)
    found.notes["blocks freed after s"] = round(freed_s if freed_s is not None else time.monotonic() - harmed_s, 1)
    if found.notes["blocks freed after s"] > CALLER_LEASE_S + LEASE_MARGIN_S:
        found.faults.append("the dead gateway's requests held blocks for longer than its lease")
    found.pauses_s = [stream.longest_gap_s(harmed_s) for stream in load.streams if stream.is_whole]
    found.duration_s = time.monotonic() - start_s
    return found


async def hang_gateway(setting: Setting) -> Round:
    """SIGSTOP of a gateway: within its lease what it ran is cancelled everywhere. When it goes on, so do its streams."""
    found = Round(scenario="hang a gateway")
    start_s = time.monotonic()
    pid = await random_pid(setting, GATEWAY)
    async with setting.long_load() as load:
        await load.wait_begun()
        harmed_s = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            moving: list[Stream] = []
            while "blocks freed after s" not in found.notes:
                await asyncio.sleep(0.2)
                num_running = await setting.cluster.num_running(1.0)  # unknown while the proxy asks the gateway that is stopped
                elapsed_s = time.monotonic() - harmed_s
                moving = [s for s in load.streams if s.finish_reason or time.monotonic() - s.arrivals_s[-1] < 1.0]
                num_moving = sum(stream.finish_reason is None for stream in moving)
                if num_running is not None and elapsed_s > 2 and num_running <= num_moving:
                    found.notes["blocks freed after s"] = round(elapsed_s, 1)
                elif elapsed_s > 2 * CALLER_LEASE_S + LEASE_MARGIN_S:
                    found.faults.append(f"{num_running} requests ran though only {num_moving} streams moved: the lease was not kept")
                    break
        finally:
            _signal(pid, signal.SIGCONT)
        await load.wait_ended()
    found = await finish(found, setting, load, harmed_s, start_s)
    found.pauses_s = [stream.longest_gap_s(harmed_s) for stream in moving if stream.is_whole]  # the others stood still themselves
    return found


async def redeploy(setting: Setting) -> Round:
    """A changed setting restarts every process, one after the other, under long streams."""

    return await _disturb("redeploy", setting, setting.long_load(), setting.cluster.redeploy)


async def scale_down(setting: Setting) -> Round:
    """From all replicas to one under long streams; then back."""

    async def harm() -> None:
        await setting.cluster.scale(1)

    try:
        return await _disturb("scale down to 1", setting, setting.long_load(), harm)
    finally:
        await setting.cluster.scale(setting.cluster.layout.num_replicas)


SCENARIOS: dict[str, Scenario] = {
    "kill-replica": kill_replica,
    "hang-replica": hang_replica,
    "kill-router": kill_router,
    "kill-router-and-replica": kill_router_and_replica,
    "kill-gateway": kill_gateway,
    "hang-gateway": hang_gateway,
    "redeploy": redeploy,
    "scale-down": scale_down,
}


async def _disturb(
    name: str, setting: Setting, load: Load, harm: Callable[[], Awaitable[None]], heal: Callable[[], None] = lambda: None
) -> Round:
    """Streams, harm at a random moment, and the check that nobody noticed more than a pause."""
    found = Round(scenario=name)
    start_s = time.monotonic()
    async with load:
        await load.wait_begun()
        await asyncio.sleep(setting.dice.uniform(0.0, 1.0))
        harmed_s = time.monotonic()
        await harm()
        await load.wait_ended()
    heal()
    return await finish(found, setting, load, harmed_s, start_s)


async def finish(found: Round, setting: Setting, load: Load, harmed_s: float, start_s: float, idle_s: float = 20.0) -> Round:
    """What the clients of `load` saw, and whether everything is given back within `idle_s`."""
    found.num_streams = len(load.streams)
    found.faults += load.faults()
    last_s = max((stream.arrivals_s[-1] for stream in load.streams if stream.arrivals_s), default=0.0)
    if last_s <= harmed_s:
        found.faults.append("every stream had ended before the harm: nothing was tried")
    found.pauses_s = [stream.longest_gap_s(harmed_s) for stream in load.streams if stream.is_whole]
    try:
        await setting.cluster.wait_idle(idle_s)
    except TimeoutError as error:
        found.faults.append(f"something is still held: {error}")
    found.duration_s = time.monotonic() - start_s
    return found


async def random_pid(setting: Setting, deployment: str) -> int:
    """A living process of the deployment. Asked before the streams begin: the dashboard takes a second to answer, in which fast ones
    may end, and names a process that was just killed for a while."""
    async with asyncio.timeout(30):
        while not (alive := {name: pid for name, pid in (await setting.cluster.pids(deployment)).items() if psutil.pid_exists(pid)}):
            await asyncio.sleep(0.2)
    return alive[setting.dice.choice(sorted(alive))]


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # Serve has replaced it meanwhile


async def _short_answer(url: str) -> int:
    async with httpx.AsyncClient(timeout=60) as http:
        return (await http.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 4})).status_code
