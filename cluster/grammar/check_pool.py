"""Checks of clients' grammars in processes that may be killed, each answered within seconds whatever the grammar is."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cluster.failures import Unavailable
from cluster.grammar.check_turns import CheckTurns, Turn
from cluster.grammar.check_worker import CheckProcessDied, CheckWorker
from cluster.grammar.verdict_cache import Verdict, VerdictCache
from replicas.grammar.checking.checks import CheckedGrammar
from replicas.grammar.checking.limits import GrammarLimits, check_sizes
from replicas.grammar.compiler import GrammarError
from replicas.grammar_spec import GrammarKind, GrammarSpec

logger = logging.getLogger(__name__)

TOO_COMPLEX = "the grammar is too complex to be compiled within the limits of time and memory; make it smaller"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLimits:
    """How long checks may take. Real schemas take milliseconds."""

    num_processes: int = 3
    """Kept warm; each takes some 40 MiB."""
    max_wait_s: float = 1.0
    """A check that has waited this long for its turn is answered with 503."""
    slow_after_s: float = 0.25
    """A check that runs longer is slow: each tenant may have one of these at a time, and one process is always left to the others."""
    deadline_s: float = 1.5
    """A check that runs longer is killed: too complex."""
    least_cpu_s: float = 0.5
    """A check that is killed although it had less processor time than this is not at fault: 503, and it may be tried again."""
    start_s: float = 5.0
    """How long a process may take to be ready. Only a check that finds no warm one waits for it."""
    max_waiting: int = 256


class Worker(Protocol):
    """A process that checks; `CheckWorker`, or a fake."""

    async def wait_ready(self) -> None: ...

    async def check(self, question: dict[str, Any]) -> dict[str, Any]: ...

    def cpu_s(self) -> float: ...

    async def kill(self) -> None: ...


class GrammarCheckPool:
    """Owns the processes, the verdicts, and who waits. Every `admit` ends within `max_wait_s + deadline_s` and the time to kill.

    Equal grammars that arrive together are checked once. A process that was slow, or died, is replaced, so its memory comes back.
    """

    def __init__(
        self, limits: CheckLimits | None = None, make_worker: Callable[[], Worker] = CheckWorker, cache: VerdictCache | None = None
    ) -> None:
        self._limits = limits or CheckLimits()
        self._make_worker = make_worker
        self._cache = VerdictCache() if cache is None else cache
        self._turns = CheckTurns(self._limits.num_processes, self._limits.max_waiting)
        self._idle: deque[Worker] = deque()  # the warmest on the right
        self._num_workers = 0  # idle or checking
        self._starts: dict[Turn, asyncio.Future[None]] = {}  # a waiting check -> done when its turn comes
        self._checks: dict[str, asyncio.Task[Verdict]] = {}  # key of a verdict -> the check that will find it
        self._is_closed = False
        self._killings: set[asyncio.Task[None]] = set()

    def warm_up(self) -> None:
        """Starts the processes; does not wait until they are ready."""
        while self._num_workers < self._limits.num_processes and not self._is_closed:
            self._idle.appendleft(self._make_worker())
            self._num_workers += 1

    async def admit(self, spec: GrammarSpec, *, tenant: str, drops_unsupported: bool = False) -> CheckedGrammar:
        """The grammar as replicas get it. Raises GrammarError for one that cannot be enforced, Unavailable while too many checks wait."""
        check_sizes(spec, GrammarLimits())  # a text of megabytes goes no further
        key = f"{spec.key}:{drops_unsupported}"
        verdict = self._cache.get(key)
        if verdict is None:
            check = self._checks.get(key)
            if check is None:
                # In a context of its own: Serve would end the check together with the request that happened to ask first.
                check = asyncio.create_task(self._check(key, spec, tenant, drops_unsupported), name="grammar-check", context=Context())
                self._checks[key] = check
                check.add_done_callback(lambda done: self._forget(key, done))
            verdict = await asyncio.shield(check)
        if verdict.error is not None:
            raise GrammarError(verdict.error)
        kind, text = verdict.kind or spec.kind, spec.text if verdict.text is None else verdict.text
        return CheckedGrammar(spec=replace(spec, kind=kind, text=text), dropped=verdict.dropped)

    async def close(self) -> None:
        """Ends all checks and processes; `admit` must not be called any more."""
        self._is_closed = True
        for check in list(self._checks.values()):
            check.cancel()
        await asyncio.gather(*self._checks.values(), return_exceptions=True)
        await asyncio.gather(*self._killings, *(worker.kill() for worker in self._idle))
        self._idle.clear()
        self._num_workers = 0

    async def _check(self, key: str, spec: GrammarSpec, tenant: str, drops_unsupported: bool) -> Verdict:
        question = {
            "kind": spec.kind.value,
            "text": spec.text,
            "is_compact": spec.is_compact,
            "begins_after": spec.begins_after,
            "drops_unsupported": drops_unsupported,
        }
        turn = Turn(tenant)
        try:
            await self._wait_turn(turn)
            answer = await self._answer(turn, question)
        finally:
            self._turns.end(turn)
            self._begin()
        verdict = Verdict(
            error=answer.get("error"),
            kind=GrammarKind(answer["kind"]) if "kind" in answer else None,
            text=answer.get("text"),
            dropped=tuple(answer.get("dropped", ())),
        )
        self._cache.put(key, verdict)
        return verdict

    async def _wait_turn(self, turn: Turn) -> None:
        """Raises Unavailable when it does not come in time."""
        if not self._turns.try_add(turn):
            raise _busy(self._limits)
        start = self._starts[turn] = asyncio.get_running_loop().create_future()
        self._begin()
        try:
            async with asyncio.timeout(self._limits.max_wait_s):
                await start
        except TimeoutError as error:
            raise _busy(self._limits) from error
        finally:
            del self._starts[turn]

    def _begin(self) -> None:
        for turn in self._turns.begin():
            start = self._starts[turn]
            if not start.done():
                start.set_result(None)

    async def _answer(self, turn: Turn, question: dict[str, Any]) -> dict[str, Any]:
        """Raises Unavailable for a check that had to make room, or that got no process or no processor time."""
        self.warm_up()
        worker = self._idle.pop()
        is_good = False
        try:
            async with asyncio.timeout(self._limits.start_s):
                await worker.wait_ready()
            answer = await self._answer_of(worker, turn, question)
            is_good = not turn.is_slow
            return answer
        except TimeoutError as error:
            raise _busy(self._limits) from error
        except CheckProcessDied:
            logger.warning("a grammar of tenant %s (%s) ended its check process", turn.tenant, question["kind"])
            return {"error": TOO_COMPLEX}
        finally:
            if is_good:
                self._idle.append(worker)
            else:
                self._num_workers -= 1
                self._replace(worker)

    async def _answer_of(self, worker: Worker, turn: Turn, question: dict[str, Any]) -> dict[str, Any]:
        before_s = worker.cpu_s()
        asked = asyncio.create_task(worker.check(question))
        try:
            done, _ = await asyncio.wait([asked], timeout=self._limits.slow_after_s)
            if not done:
                if not self._turns.try_go_on(turn):
                    raise _busy(self._limits)
                done, _ = await asyncio.wait([asked], timeout=self._limits.deadline_s - self._limits.slow_after_s)
            if done:
                return asked.result()
            cpu_s = worker.cpu_s() - before_s
            logger.warning("a grammar of tenant %s (%s) took %.1f s of processor time: killed", turn.tenant, question["kind"], cpu_s)
            if cpu_s < self._limits.least_cpu_s:
                raise _busy(self._limits)
            return {"error": TOO_COMPLEX}
        finally:
            asked.cancel()

    def _replace(self, worker: Worker) -> None:
        """Kills in the background; a successor starts at once, so that it is warm when it is needed."""
        self.warm_up()
        killing = asyncio.create_task(worker.kill(), context=Context())
        self._killings.add(killing)
        killing.add_done_callback(self._killings.discard)

    def _forget(self, key: str, check: asyncio.Task[Verdict]) -> None:
        del self._checks[key]
        if not check.cancelled():
            check.exception()  # whoever waited has it; if nobody did, it is of no interest


def _busy(limits: CheckLimits) -> Unavailable:
    return Unavailable("Too many grammars are being checked.", retry_after_s=limits.deadline_s)
