"""A gateway's line to a router of the same process."""

from __future__ import annotations

from cluster.serve.router_line import RouterLine
from router.live.async_router import AsyncRouter
from router.live.batch import Answers, Batch


def line_to(router: AsyncRouter) -> RouterLine:
    async def deliver(batch: Batch) -> Answers:
        for notice in batch.notices:
            router.note(notice)
        return await router.decide(batch.caller, batch.requests)

    async def wait_answers(caller: str) -> Answers:
        return await router.wait_answers(caller, timeout_s=1.0)

    return RouterLine("gateway", deliver, wait_answers)
