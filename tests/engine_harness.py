"""Drives an engine to the end of its requests and keeps their output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from replicas.engine.engine import Engine
from replicas.request import FinishReason, GenerationRequest, TokenLogprob
from replicas.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


@dataclass
class Generated:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    error: str | None = None


def requests_for(
    prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY, *, seeds: Sequence[int] | None = None, prefix: str = "r"
) -> list[GenerationRequest]:
    return [
        GenerationRequest(request_id=f"{prefix}{i}", prompt_ids=tuple(prompt), params=params, seed=seeds[i] if seeds else i)
        for i, prompt in enumerate(prompts)
    ]


def run(engine: Engine, requests: Iterable[GenerationRequest], *, check: bool = True) -> list[Generated]:
    """Submits all, steps until idle, checks the scheduler's invariants after each step; results in the order given."""
    requests = list(requests)
    results = {request.key: Generated() for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        for progress in engine.step().progress:
            result = results[progress.key]
            assert result.finish_reason is None, "progress after the end"
            result.token_ids += progress.token_ids
            result.logprobs += progress.logprobs
            if progress.prompt_logprobs is not None:
                assert result.prompt_logprobs is None, "prompt log-probabilities reported twice"
                assert result.token_ids == list(progress.token_ids), "prompt log-probabilities after the first token"
                result.prompt_logprobs = progress.prompt_logprobs
            result.finish_reason = progress.finish_reason
            result.num_cached_tokens = progress.num_cached_tokens
            result.error = progress.error
        if check:
            engine.check()
    assert all(result.finish_reason is not None for result in results.values())
    return list(results.values())
