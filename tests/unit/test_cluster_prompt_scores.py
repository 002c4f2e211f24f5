"""The choices of a prompt that wait for the first one's log-probabilities."""

from __future__ import annotations

import asyncio

from cluster.generation.prompt_scores import PromptScores
from replicas.request import FinishReason, TokenLogprob

SCORES = (TokenLogprob(7, -0.5, ()),)


async def test_siblings_wait_until_the_scores_are_known() -> None:
    scores = PromptScores(is_all=False)
    waits = [asyncio.ensure_future(scores.wait_delta(index)) for index in (1, 2)]
    await asyncio.sleep(0)
    assert not any(wait.done() for wait in waits)
    assert not scores.are_known
    scores.note(SCORES)
    assert scores.are_known
    deltas = await asyncio.gather(*waits)
    assert [(delta.index, delta.prompt_logprobs, delta.finish_reason) for delta in deltas] == [(1, SCORES, None), (2, SCORES, None)]


async def test_scores_that_are_all_of_the_answer_end_it() -> None:
    scores = PromptScores(is_all=True)
    scores.note(SCORES)
    assert (await scores.wait_delta(1)).finish_reason is FinishReason.LENGTH


async def test_scores_of_a_prompt_of_one_token_are_known_though_empty() -> None:
    scores = PromptScores(is_all=False)
    scores.note(())
    assert scores.are_known
    assert (await scores.wait_delta(1)).prompt_logprobs == ()
