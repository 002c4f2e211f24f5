"""The pool over fake processes that answer when the test says so, and once over a real one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cluster.failures import Unavailable
from cluster.grammar.check_pool import TOO_COMPLEX, CheckLimits, GrammarCheckPool
from cluster.grammar.check_worker import CheckProcessDied, CheckWorker
from cluster.grammar.verdict_cache import Verdict, VerdictCache
from replicas.grammar.compiler import GrammarError
from replicas.grammar_spec import GrammarKind, GrammarSpec

QUICK = CheckLimits(num_processes=3, max_wait_s=0.05, slow_after_s=0.02, deadline_s=0.06, least_cpu_s=0.5)


class FakeWorker:
    """Answers `ok` at once, or as the text of the grammar says: `slow` never, `wait` when released, `die` with its death."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.release = asyncio.Event()
        self.is_killed = False
        self.used_s = 0.0

    async def wait_ready(self) -> None:
        pass

    async def check(self, question: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(question["text"])
        if question["text"].startswith("slow"):
            self.used_s += 1.0 if "starved" not in question["text"] else 0.0
            await asyncio.Event().wait()
        if question["text"].startswith("wait"):
            await self.release.wait()
        if question["text"].startswith("die"):
            raise CheckProcessDied
        if question["text"].startswith("wrong"):
            return {"error": "wrong"}
        return {"dropped": ["#/a"] if question["drops_unsupported"] else [], "text": "less"} if question["text"] == "more" else {}

    def cpu_s(self) -> float:
        return self.used_s

    async def kill(self) -> None:
        self.is_killed = True


class Fleet:
    """Every worker that a pool made."""

    def __init__(self) -> None:
        self.made: list[FakeWorker] = []

    def make(self) -> FakeWorker:
        self.made.append(FakeWorker())
        return self.made[-1]

    @property
    def asked(self) -> list[str]:
        return sorted(text for worker in self.made for text in worker.asked)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
async def pool(fleet: Fleet) -> AsyncIterator[GrammarCheckPool]:
    made = GrammarCheckPool(QUICK, fleet.make)
    yield made
    await made.close()
    assert sum(not worker.is_killed for worker in fleet.made) == 0


def spec(text: str) -> GrammarSpec:
    return GrammarSpec(kind=GrammarKind.REGEX, text=text)


async def test_grammar_is_checked_once_and_its_verdict_kept(pool: GrammarCheckPool, fleet: Fleet) -> None:
    for _ in range(3):
        assert (await pool.admit(spec("more"), tenant="a")).spec == spec("less")
        with pytest.raises(GrammarError, match="wrong"):
            await pool.admit(spec("wrong"), tenant="b")
    assert fleet.asked == ["more", "wrong"]
    assert (await pool.admit(spec("more"), tenant="a", drops_unsupported=True)).dropped == ("#/a",)


async def test_equal_grammars_that_arrive_together_are_checked_once(pool: GrammarCheckPool, fleet: Fleet) -> None:
    found = await asyncio.gather(*(pool.admit(spec("more"), tenant="a") for _ in range(20)))
    assert len({checked.spec for checked in found}) == 1
    assert fleet.asked == ["more"]


async def test_check_goes_on_for_others_when_the_first_to_ask_leaves(fleet: Fleet) -> None:
    pool = GrammarCheckPool(CheckLimits(slow_after_s=5, deadline_s=5), fleet.make)
    first = asyncio.create_task(pool.admit(spec("wait"), tenant="a"))
    second = asyncio.create_task(pool.admit(spec("wait"), tenant="a"))
    while not fleet.asked:
        await asyncio.sleep(0)
    first.cancel()
    for worker in fleet.made:
        worker.release.set()
    assert (await second).spec == spec("wait")
    assert fleet.asked == ["wait"]
    await pool.close()


async def test_check_beyond_its_deadline_is_too_complex_for_good_and_its_process_is_replaced(pool: GrammarCheckPool, fleet: Fleet) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError, match=TOO_COMPLEX):
            await pool.admit(spec("slow"), tenant="a")
    assert fleet.asked == ["slow"]
    assert [worker.is_killed for worker in fleet.made].count(False) == QUICK.num_processes


async def test_check_without_processor_time_is_not_at_fault(pool: GrammarCheckPool, fleet: Fleet) -> None:
    for _ in range(2):
        with pytest.raises(Unavailable):
            await pool.admit(spec("slow starved"), tenant="a")
    assert fleet.asked == 2 * ["slow starved"]


async def test_death_of_the_process_is_the_grammars_fault(pool: GrammarCheckPool, fleet: Fleet) -> None:
    with pytest.raises(GrammarError, match=TOO_COMPLEX):
        await pool.admit(spec("die"), tenant="a")
    assert (await pool.admit(spec("fine"), tenant="a")).spec == spec("fine")


async def test_second_slow_check_of_a_tenant_makes_room_and_others_are_checked_meanwhile(pool: GrammarCheckPool, fleet: Fleet) -> None:
    slow = [asyncio.create_task(pool.admit(spec(f"slow {number}"), tenant="a")) for number in range(2)]
    while len(fleet.asked) < 2:
        await asyncio.sleep(0)
    assert (await pool.admit(spec("fine"), tenant="b")).spec == spec("fine")
    ends = await asyncio.gather(*slow, return_exceptions=True)
    assert sorted(type(end).__name__ for end in ends) == ["GrammarError", "Unavailable"]


async def test_grammars_that_wait_too_long_are_turned_away_with_a_time_to_retry(fleet: Fleet) -> None:
    limits = CheckLimits(num_processes=2, max_wait_s=0.03, slow_after_s=5, deadline_s=5)
    pool = GrammarCheckPool(limits, fleet.make)
    held = [asyncio.create_task(pool.admit(spec(f"wait {number}"), tenant=str(number))) for number in range(2)]
    while len(fleet.asked) < 2:
        await asyncio.sleep(0)
    with pytest.raises(Unavailable) as busy:
        await pool.admit(spec("fine"), tenant="c")
    assert busy.value.retry_after_s == 5
    for worker in fleet.made:
        worker.release.set()
    await asyncio.gather(*held)
    assert (await pool.admit(spec("fine"), tenant="c")).spec == spec("fine")
    await pool.close()


async def test_pool_that_closes_ends_its_checks(fleet: Fleet) -> None:
    pool = GrammarCheckPool(CheckLimits(slow_after_s=5, deadline_s=5), fleet.make)
    asked = asyncio.create_task(pool.admit(spec("wait"), tenant="a"))
    while not fleet.asked:
        await asyncio.sleep(0)
    await pool.close()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert all(worker.is_killed for worker in fleet.made)


def test_verdicts_are_bounded_in_number_and_bytes() -> None:
    cache = VerdictCache(max_verdicts=2, max_bytes=1_000)
    for key in "abc":
        cache.put(key, Verdict())
        assert cache.get("a") is not None  # used, so it stays
    assert (cache.get("b"), len(cache)) == (None, 2)
    cache.put("d", Verdict(text="x" * 700))
    assert (cache.get("a"), cache.get("d"), len(cache)) == (None, Verdict(text="x" * 700), 1)


@asynccontextmanager
async def real_processes(*, deadline_s: float) -> AsyncIterator[GrammarCheckPool]:
    """A pool of two real processes, all of which have ended afterwards."""
    limits = CheckLimits(num_processes=2, slow_after_s=0.1, deadline_s=deadline_s, least_cpu_s=0.0, start_s=60)
    made: list[CheckWorker] = []

    def make() -> CheckWorker:
        made.append(CheckWorker())
        return made[-1]

    pool = GrammarCheckPool(limits, make)
    try:
        yield pool
    finally:
        await pool.close()
    for worker in made:
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, signal.SIGCONT)


@pytest.mark.slow
async def test_real_process_answers_whatever_a_grammar_needs_of_the_stack() -> None:
    """Over a quarter of a second: an interpreter starts."""
    async with real_processes(deadline_s=60) as pool:
        unique = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text='{"type": "array", "uniqueItems": true}')
        with pytest.raises(GrammarError, match="#/uniqueItems: uniqueItems cannot be enforced"):
            await pool.admit(unique, tenant="a")
        assert (await pool.admit(unique, tenant="a", drops_unsupported=True)).dropped == ("#/uniqueItems",)
        # A chain of references that overflows a usual stack of 8 MB.
        chain = "start: a0\n" + "\n".join(f'a{number}: "x" a{number + 1}' for number in range(4_500)) + '\na4500: "x"'
        assert (await pool.admit(GrammarSpec(kind=GrammarKind.LARK, text=chain), tenant="a")).spec.text == chain


@pytest.mark.slow
async def test_grammar_that_never_compiles_costs_only_the_process() -> None:
    """Over a quarter of a second: an interpreter starts, and is killed at its deadline."""
    async with real_processes(deadline_s=0.5) as pool:
        joined = " & ".join(f"/.*a{number}.{{9}}b.*/" for number in range(40))
        with pytest.raises(GrammarError, match=TOO_COMPLEX):
            await pool.admit(GrammarSpec(kind=GrammarKind.LARK, text=f"start: T\nT: {joined}"), tenant="a")
