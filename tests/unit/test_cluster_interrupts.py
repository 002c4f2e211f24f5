"""Waits that are interrupted from outside, and those that are not."""

from __future__ import annotations

import asyncio

import pytest

from cluster.serve.interrupts import Interrupted, Interrupts


async def _wait(interrupts: Interrupts, target: str, event: asyncio.Event) -> str:
    async with interrupts.guard(target):
        await event.wait()
    return "ended"


async def test_interrupt_ends_the_waits_for_its_target_only() -> None:
    interrupts = Interrupts()
    event = asyncio.Event()
    hung = [asyncio.create_task(_wait(interrupts, "a", event)) for _ in range(3)]
    other = asyncio.create_task(_wait(interrupts, "b", event))
    await asyncio.sleep(0)
    interrupts.interrupt("a")
    assert [type(result) for result in await asyncio.gather(*hung, return_exceptions=True)] == [Interrupted] * 3
    event.set()
    assert await other == "ended"


async def test_interrupt_without_a_wait_leaves_later_ones_alone() -> None:
    interrupts = Interrupts()
    interrupts.interrupt("a")
    event = asyncio.Event()
    event.set()
    assert await _wait(interrupts, "a", event) == "ended"


async def test_cancel_of_a_guarded_wait_stays_a_cancel() -> None:
    interrupts = Interrupts()
    task = asyncio.create_task(_wait(interrupts, "a", asyncio.Event()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    interrupts.interrupt("a")  # nobody is left to hear it


async def test_timeout_of_the_body_stays_a_timeout() -> None:
    interrupts = Interrupts()
    with pytest.raises(TimeoutError):
        async with interrupts.guard("a"):
            raise TimeoutError
