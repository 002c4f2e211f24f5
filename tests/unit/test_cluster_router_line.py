"""The line over a router that answers when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster.failures import RouterGone
from cluster.serve.router_line import RouterLine
from router.live.batch import Answer, Answers, Batch, PrefillEnded, RequestEnded
from router.snapshot import Decision, Rejection, RoutingRequest

LIFE = "first"


def request(name: str) -> RoutingRequest:
    return RoutingRequest(request_id=name, model="m", num_prompt_tokens=1, max_tokens=1)


def answers(*names: str, life: str = LIFE, is_known: bool = True) -> Answers:
    decided = tuple(Answer(name, Decision(request_id=name, replica_id="r")) for name in names)
    return Answers(life=life, answers=decided, is_known=is_known)


class Router:
    """Keeps every call until the test answers it."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.polls: list[str] = []
        self._calls: asyncio.Queue[asyncio.Future[Answers]] = asyncio.Queue()
        self._polls: asyncio.Queue[asyncio.Future[Answers]] = asyncio.Queue()

    async def deliver(self, batch: Batch) -> Answers:
        self.batches.append(batch)
        return await self._answered(self._calls)

    async def wait_answers(self, caller: str) -> Answers:
        self.polls.append(caller)
        return await self._answered(self._polls)

    async def answer(self, with_what: Answers | Exception) -> None:
        """The oldest batch without an answer."""
        await self._resolve(self._calls, with_what)

    async def answer_poll(self, with_what: Answers | Exception) -> None:
        await self._resolve(self._polls, with_what)

    async def _answered(self, calls: asyncio.Queue[asyncio.Future[Answers]]) -> Answers:
        future: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        calls.put_nowait(future)
        return await future

    async def _resolve(self, calls: asyncio.Queue[asyncio.Future[Answers]], with_what: Answers | Exception) -> None:
        async with asyncio.timeout(30):
            future = await calls.get()
        if isinstance(with_what, Exception):
            future.set_exception(with_what)
        else:
            future.set_result(with_what)
        await settled()


async def settled() -> None:
    """Everything that can go on has done so."""
    for _ in range(10):
        await asyncio.sleep(0)


def asked(line: RouterLine, *names: str) -> list[asyncio.Task[Decision | Rejection]]:
    return [asyncio.create_task(line.acquire(request(name))) for name in names]


def sent(batch: Batch) -> list[str]:
    return [each.request_id for each in batch.requests]


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
async def line(router: Router) -> AsyncIterator[RouterLine]:
    made = RouterLine("g", router.deliver, router.wait_answers)
    yield made
    await made.close()


async def test_first_request_goes_at_once_and_what_comes_meanwhile_goes_together(line: RouterLine, router: Router) -> None:
    calls = asked(line, "a")
    await settled()
    calls += asked(line, "b", "c")
    line.tell(RequestEnded("z", 3))
    line.tell(PrefillEnded("y"))
    await settled()
    assert [sent(batch) for batch in router.batches] == [["a"]]
    await router.answer(answers("a"))
    assert [sent(batch) for batch in router.batches] == [["a"], ["b", "c"]]
    assert router.batches[1].notices == (RequestEnded("z", 3), PrefillEnded("y"))
    assert {each.caller for batch in router.batches for each in (batch, *batch.requests)} == {"g"}
    await router.answer(answers("c", "b"))
    assert [(await call).request_id for call in calls] == ["a", "b", "c"]
    assert not router.polls, "nobody waits"


async def test_request_that_has_to_wait_holds_no_other_back(line: RouterLine, router: Router) -> None:
    slow, fast = asked(line, "slow", "fast")
    await settled()
    await router.answer(answers("fast"))
    assert fast.done()
    assert router.polls == ["g"]
    [following] = asked(line, "following")
    await settled()
    await router.answer(answers("following"))
    assert following.done()
    await router.answer_poll(answers())
    assert router.polls == ["g", "g"], "it waits on"
    await router.answer_poll(answers("slow"))
    assert (await slow).request_id == "slow"
    assert len(router.polls) == 2


async def test_cancelled_request_of_a_batch_is_forgotten_and_its_release_follows(line: RouterLine, router: Router) -> None:
    left, stays = asked(line, "left", "stays")
    await settled()
    left.cancel()
    await settled()
    line.tell(RequestEnded("left", 0))
    await router.answer(answers("left", "stays"))
    assert (await stays).request_id == "stays"
    assert left.cancelled()
    assert router.batches[1].notices == (RequestEnded("left", 0),)


async def test_notice_that_did_not_arrive_is_told_again(line: RouterLine, router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.serve.router_line.RETRY_S", 0.0)
    line.tell(RequestEnded("a", 3))
    await settled()
    line.tell(RequestEnded("b", 4))
    await router.answer(RouterGone("no answer"))
    await router.answer(answers())
    assert [batch.notices for batch in router.batches] == [(RequestEnded("a", 3),), (RequestEnded("a", 3), RequestEnded("b", 4))]


async def test_request_takes_along_what_did_not_arrive_and_comes_after_it(line: RouterLine, router: Router) -> None:
    line.tell(RequestEnded("a", 3))
    await settled()
    await router.answer(RouterGone("no answer"))
    assert len(router.batches) == 1, "it is told again in a second"
    [call] = asked(line, "a")
    await settled()
    assert (router.batches[1].notices, sent(router.batches[1])) == ((RequestEnded("a", 3),), ["a"])
    await router.answer(answers("a"))
    assert (await call).request_id == "a"


async def test_request_that_is_cancelled_before_it_was_sent_is_never_sent(line: RouterLine, router: Router) -> None:
    asked(line, "a")
    await settled()
    left, stays = asked(line, "left", "stays")
    await settled()
    left.cancel()
    await settled()
    await router.answer(answers("a"))
    assert [sent(batch) for batch in router.batches] == [["a"], ["stays"]]
    await router.answer(answers("stays"))
    await stays


async def test_dead_router_ends_every_wait_and_what_came_meanwhile_is_sent_to_the_next(line: RouterLine, router: Router) -> None:
    queued, in_flight = asked(line, "queued")[0], []
    await settled()
    await router.answer(answers())
    in_flight = asked(line, "in flight")
    await settled()
    [later] = asked(line, "later")
    await settled()
    await router.answer(RouterGone("it died"))
    for call in (queued, *in_flight):
        with pytest.raises(RouterGone, match="died"):
            await call
    await router.answer(answers("later", life="second"))
    assert (await later).request_id == "later"


async def test_router_that_restarted_between_two_calls_is_noticed_by_its_answer(line: RouterLine, router: Router) -> None:
    [queued] = asked(line, "queued")
    await settled()
    await router.answer(answers())
    [new] = asked(line, "new")
    await settled()
    await router.answer(answers("new", life="second"))
    assert (await new).request_id == "new"
    with pytest.raises(RouterGone, match="restarted"):
        await queued


@pytest.mark.parametrize("reply", [RouterGone("it died"), answers(is_known=False), Answers(life=LIFE, answers=(Answer("queued", None),))])
async def test_wait_that_the_router_knows_nothing_of_any_more_ends(line: RouterLine, router: Router, reply: Answers | Exception) -> None:
    [queued] = asked(line, "queued")
    await settled()
    await router.answer(answers())
    await router.answer_poll(reply)
    with pytest.raises(RouterGone):
        await queued


async def test_wait_that_found_nothing_ends_no_request_that_was_sent_after_it(line: RouterLine, router: Router) -> None:
    """The router forgets a gateway that it owes nothing; the answer that emptied its box is on the way."""
    [queued] = asked(line, "queued")
    await settled()
    await router.answer(answers())
    [second] = asked(line, "second")
    await settled()
    await router.answer(answers())
    await router.answer_poll(answers("queued"))  # and the line asks for the second one
    [third] = asked(line, "third")
    await settled()
    await router.answer_poll(answers(is_known=False))
    assert not second.done()
    await router.answer(answers("second", "third"))
    assert [(await call).request_id for call in (queued, second, third)] == ["queued", "second", "third"]


async def test_id_that_is_asked_anew_takes_no_answer_to_the_older_request(line: RouterLine, router: Router) -> None:
    [queued] = asked(line, "a")
    await settled()
    await router.answer(answers())
    asked(line, "b")  # on its way, so that what follows waits for it
    await settled()
    queued.cancel()
    await settled()
    line.tell(RequestEnded("a", 0))
    [anew] = asked(line, "a")
    await settled()
    await router.answer_poll(answers("a"))
    assert not anew.done()
    await router.answer(answers("b"))
    assert (router.batches[2].notices, sent(router.batches[2])) == ((RequestEnded("a", 0),), ["a"])
    await router.answer(answers("a"))
    assert (await anew).request_id == "a"


async def test_error_of_the_router_reaches_whoever_waits_and_the_line_goes_on(line: RouterLine, router: Router) -> None:
    [refused] = asked(line, "refused")
    await settled()
    await router.answer(ValueError("not so"))
    with pytest.raises(ValueError, match="not so"):
        await refused
    [following] = asked(line, "following")
    await router.answer(answers("following"))
    assert (await following).request_id == "following"


async def test_closing_ends_every_wait(router: Router) -> None:
    line = RouterLine("g", router.deliver, router.wait_answers)
    calls = asked(line, "a")
    await settled()
    calls += asked(line, "b")
    await settled()
    await line.close()
    for call in calls:
        with pytest.raises(RouterGone, match="closing"):
            await call
