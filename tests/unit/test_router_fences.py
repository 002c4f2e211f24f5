"""Whoever watches the fences hears of each change, once and at once."""

from __future__ import annotations

import asyncio

from router.live.fences import Fences


async def test_watcher_hears_of_a_change_at_once() -> None:
    fences = Fences()
    watcher = asyncio.create_task(fences.wait_changed(fences.news.version, timeout_s=60.0))
    await asyncio.sleep(0)
    fences.set(frozenset({"r"}))
    async with asyncio.timeout(30):
        news = await watcher
    assert news.fenced == {"r"}
    assert news == fences.news


async def test_watcher_that_missed_a_change_is_told_without_waiting() -> None:
    fences = Fences()
    version = fences.news.version
    fences.set(frozenset({"r"}))
    async with asyncio.timeout(30):
        assert (await fences.wait_changed(version, timeout_s=60.0)).fenced == {"r"}


async def test_watcher_without_news_gets_the_same_state_after_the_timeout() -> None:
    fences = Fences()
    fences.set(frozenset())  # no change
    assert await fences.wait_changed(fences.news.version, timeout_s=0.001) == fences.news


def test_version_of_a_restarted_router_is_new() -> None:
    earlier = Fences()
    earlier.set(frozenset({"r"}))
    assert Fences().news.version > earlier.news.version
