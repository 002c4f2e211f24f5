"""A scheduler without an engine: requests, steps that sample one token, and what they compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcache.block_pool import BlockPool
from replicas.request import GenerationRequest, RequestProgress
from replicas.sampling_params import SamplingParams
from replicas.scheduling.scheduler import Scheduler
from replicas.scheduling.scheduler_config import SchedulerConfig
from replicas.scheduling.step_plan import StepPlan

EOS = 99


def new_scheduler(
    num_blocks: int = 100,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 32,
    max_model_len: int = 60,
    caching: bool = True,
    mixed_budget: int | None = None,
    max_urgent_share: float = 0.8,
    max_urgent_pause_s: float = 1.0,
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_num_mixed_tokens=mixed_budget,
        max_model_len=max_model_len,
        eos_token_ids=frozenset({EOS}),
        enable_prefix_caching=caching,
        max_urgent_share=max_urgent_share,
        max_urgent_pause_s=max_urgent_pause_s,
    )
    return Scheduler(config, BlockPool(num_blocks, block_size))


def new_request(name: str, num_prompt: int = 4, *, first: int = 0, priority: int = 0, **params: object) -> GenerationRequest:
    prompt = tuple(first + i for i in range(num_prompt))
    return GenerationRequest(
        request_id=name, prompt_ids=prompt, params=SamplingParams(**{"max_tokens": 8, **params}), seed=0, priority=priority
    )


def step(scheduler: Scheduler, token: int = 50, now_s: float = 0.0) -> tuple[StepPlan, list[RequestProgress]]:
    plan = scheduler.schedule(now_s)
    progress = scheduler.update(plan, [[token] for chunk in plan.chunks if chunk.samples])
    scheduler.check()
    return plan, progress


def drafted(scheduler: Scheduler, drafts: Mapping[str, Sequence[int]]) -> StepPlan:
    """The next plan, extended by the drafts of each named request."""
    plan = scheduler.schedule()
    return scheduler.drafts.extend(plan, [drafts.get(chunk.state.key.request_id, ()) for chunk in plan.chunks])


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(c.state.request.request_id, c.start, c.num_tokens) for c in plan.chunks]
