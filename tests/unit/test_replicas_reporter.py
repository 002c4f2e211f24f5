"""Reports to the router: events once each and in order, again after a failure, the full state when asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvcache.events import BlockStored
from replicas.engine.reporter import ReplicaIdentity, Reporter, report_interval_s
from replicas.stats import ReplicaReport, ReplicaStats, ReportReply
from replicas.step_engine import KVChanges


class _Engine:
    """Numbered events, as AsyncEngine gives them."""

    epoch = 7

    callers = ("g",)

    def __init__(self) -> None:
        self.events: list[BlockStored] = []
        self.is_between_steps = asyncio.Event()
        self.is_between_steps.set()
        self.cancelled: list[str] = []
        self.num_looks = 0

    def stats(self) -> ReplicaStats:
        self.num_looks += 1
        return ReplicaStats(num_running=len(self.events))

    def cancel_callers(self, callers: tuple[str, ...]) -> int:
        self.cancelled += callers
        return len(callers)

    async def kv_changes(self, since: int | None) -> KVChanges:
        await self.is_between_steps.wait()
        if since is None:
            return KVChanges(first_event=len(self.events), events=tuple(self.events), is_full_state=True)
        return KVChanges(first_event=since, events=tuple(self.events[since:]), is_full_state=False)

    def store(self, name: str) -> BlockStored:
        self.events.append(BlockStored(key=name.encode(), parent=b""))
        return self.events[-1]


class _Router:
    def __init__(self) -> None:
        self.reports: list[ReplicaReport] = []
        self.reply = ReportReply()
        self.is_down = False

    async def push(self, report: ReplicaReport) -> ReportReply:
        if self.is_down:
            raise ConnectionError("no router")
        self.reports.append(report)
        return self.reply


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
def engine() -> _Engine:
    return _Engine()


@pytest.fixture
def router() -> _Router:
    return _Router()


@pytest.fixture
def reporter(engine: _Engine, router: _Router) -> Reporter:
    identity = ReplicaIdentity(replica_id="r", model="m", block_size=16, max_num_seqs=4)
    return Reporter(identity, engine, router.push, interval_s=0.001, idle_interval_s=0.2)  # type: ignore[arg-type]


async def test_first_report_is_the_full_state_then_changes_follow(reporter: Reporter, engine: _Engine, router: _Router) -> None:
    first = engine.store("a")
    assert await reporter.report_once()
    second = engine.store("b")
    await reporter.report_once()
    await reporter.report_once()
    assert [(report.is_full_state, report.first_event, report.events) for report in router.reports] == [
        (True, 1, (first,)),
        (False, 1, (second,)),
        (False, 2, ()),
    ]
    assert router.reports[0].epoch == 7


async def test_events_of_a_lost_report_are_sent_again(reporter: Reporter, engine: _Engine, router: _Router) -> None:
    await reporter.report_once()
    event = engine.store("a")
    router.is_down = True
    assert not await reporter.report_once()
    router.is_down = False
    await reporter.report_once()
    assert router.reports[-1].events == (event,)


async def test_resync_makes_the_next_report_a_full_state(reporter: Reporter, engine: _Engine, router: _Router) -> None:
    event = engine.store("a")
    router.reply = ReportReply(resync=True)
    await reporter.report_once()
    await reporter.report_once()
    assert [report.is_full_state for report in router.reports] == [True, True]
    assert router.reports[1].events == (event,)


async def test_idle_replica_is_quiet_and_a_busy_one_reports_at_once(engine: _Engine, router: _Router) -> None:
    identity = ReplicaIdentity(replica_id="r", model="m", block_size=16, max_num_seqs=4)
    reporter = Reporter(identity, engine, router.push, interval_s=0.001, idle_interval_s=60.0)  # type: ignore[arg-type]
    task = asyncio.create_task(reporter.run())
    await until(lambda: engine.num_looks > 20)
    assert len(router.reports) == 1, "it looked many times and saw nothing new"
    engine.store("a")
    await until(lambda: len(router.reports) == 2)
    assert router.reports[1].events == tuple(engine.events)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_long_step_does_not_silence_the_replica_and_loses_no_event(engine: _Engine, router: _Router) -> None:
    identity = ReplicaIdentity(replica_id="r", model="m", block_size=16, max_num_seqs=4)
    reporter = Reporter(identity, engine, router.push, interval_s=0.001, idle_interval_s=0.01)  # type: ignore[arg-type]
    first = engine.store("a")
    await reporter.report_once()
    engine.is_between_steps.clear()
    second = engine.store("b")
    await reporter.report_once()
    await reporter.report_once()
    engine.is_between_steps.set()
    await reporter.report_once()
    assert [(report.first_event, report.events) for report in router.reports] == [(1, (first,)), (1, ()), (1, ()), (1, (second,))]


async def test_drain_is_told_at_once(engine: _Engine, router: _Router) -> None:
    drains = False
    identity = ReplicaIdentity(replica_id="r", model="m", block_size=16, max_num_seqs=4)
    reporter = Reporter(identity, engine, router.push, interval_s=0.001, idle_interval_s=60.0, is_draining=lambda: drains)  # type: ignore[arg-type]
    task = asyncio.create_task(reporter.run())
    await until(lambda: len(router.reports) == 1)
    drains = True
    await until(lambda: len(router.reports) == 2)
    assert [report.is_draining for report in router.reports] == [False, True]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_requests_of_callers_that_the_router_takes_for_dead_are_cancelled(
    reporter: Reporter, engine: _Engine, router: _Router
) -> None:
    router.reply = ReportReply(dead_callers=("g",))
    await reporter.report_once()
    assert router.reports[0].callers == ("g",)
    assert engine.cancelled == ["g"]


async def test_report_names_the_pool_of_its_replica(engine: _Engine, router: _Router) -> None:
    identity = ReplicaIdentity(replica_id="r", model="m", block_size=16, max_num_seqs=4, role="decode")
    await Reporter(identity, engine, router.push, interval_s=0.001).report_once()  # type: ignore[arg-type]
    assert router.reports[0].role == "decode"


@pytest.mark.parametrize(("num_replicas", "interval_s"), [(1, 0.05), (15, 0.05), (30, 0.1), (300, 1.0), (3000, 10.0)])
def test_interval_keeps_all_reports_under_300_a_second(num_replicas: int, interval_s: float) -> None:
    assert report_interval_s(num_replicas) == pytest.approx(interval_s)
    assert num_replicas / report_interval_s(num_replicas) <= 300.0001
