"""One HTTP generation request, checked and tokenized, independent of its protocol."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.generation.request_context import RequestContext
from cluster.models.served_model import ServedModel
from cluster.settings.latency_targets import LatencyTarget
from kvcache.hashing import CacheIdentity, block_keys
from replicas.request import GenerationRequest
from replicas.sampling_params import SamplingParams
from router.snapshot import RoutingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedGeneration:
    """The requests of all prompts: `requests` has one entry per prompt, each for `params.n` choices.

    Choice `c` of prompt `p` has index `p * n + c` in the answer.
    """

    response_id: str
    model: str
    requests: tuple[GenerationRequest, ...]
    params: SamplingParams
    stream: bool = False
    is_prompt_only: bool = False
    """Whether zero tokens are requested: the prompt is checked and echoed, and nothing runs."""
    target: LatencyTarget | None = None
    dropped_keywords: tuple[str, ...] = ()
    """Keywords of the client's schema that the answer does not follow, each with its path."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.params.n

    def prompt_ids(self, index: int) -> tuple[int, ...]:
        """The prompt of choice `index`."""
        return self.requests[index // self.params.n].prompt_ids


def prepare_generation(
    context: RequestContext,
    model: ServedModel,
    *,
    response_id: str,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    asked_priority: int | None = None,
    cache_salt: str = "",
    stream: bool = False,
    is_prompt_only: bool = False,
    speculates: bool = True,
    predicted_ids: tuple[int, ...] = (),
    dropped_keywords: tuple[str, ...] = (),
) -> PreparedGeneration:
    """Makes the requests of tokenized and checked prompts, with the rights in `context`. Draws a seed when the client gave none.

    `asked_priority` is the priority in the body. `predicted_ids` are drafts for every choice.
    """
    seed = secrets.randbits(63) if params.seed is None else params.seed
    priority = context.priority(asked_priority)
    target = None if is_prompt_only else context.target(model.targets, priority)
    requests = tuple(
        GenerationRequest(
            request_id=f"{response_id}-{index}",
            prompt_ids=prompt,
            params=params,
            seed=seed,
            priority=priority,
            tenant=context.principal.tenant,
            cache_salt=cache_salt,
            arrival_s=context.arrival_s,
            deadline_s=None if target is None or target.ttft_s is None else context.arrival_s + target.ttft_s,
            trace_context=context.trace_context,
            speculates=speculates,
            predicted_ids=predicted_ids,
        )
        for index, prompt in enumerate(prompts)
    )
    return PreparedGeneration(
        response_id=response_id,
        model=model.name,
        requests=requests,
        params=params,
        stream=stream,
        is_prompt_only=is_prompt_only,
        target=target,
        dropped_keywords=dropped_keywords,
    )


def routing_request(model: str, request: GenerationRequest, *, block_size: int, weights_version: str, num_choices: int) -> RoutingRequest:
    """The router's view of a request: its size, and the keys of its full blocks unless no block may be reused.

    Log-probabilities of a prompt require that one replica computes all of it and then continues alone. Once a token is emitted, the
    deadline of the first token no longer applies: it must not make a request that lost its replica look late.
    """
    reusable_ids = () if request.wants_prompt_logprobs else request.prompt_ids
    identity = CacheIdentity(salt=request.cache_salt, adapter_id=request.adapter_id, weights_version=weights_version)
    return RoutingRequest(
        request_id=request.request_id,
        model=model,
        num_prompt_tokens=len(request.prompt_ids) + len(request.output_ids),
        max_tokens=num_choices * (request.params.max_tokens or 0),
        block_keys=tuple(block_keys(identity, reusable_ids, block_size)),
        num_choices=num_choices,
        priority=request.priority,
        tenant=request.tenant,
        deadline_s=None if request.output_ids else request.deadline_s,
        arrival_s=request.arrival_s,
        attempt=request.attempt,
        trace_context=request.trace_context,
        is_whole=request.wants_prompt_logprobs or request.ends_with_its_first_token,
    )
