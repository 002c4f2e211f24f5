"""One HTTP generation request, checked and tokenized: what the gateway runs and answers, whatever the protocol."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.hashing import CacheIdentity, block_keys
from replicas.request import GenerationRequest
from replicas.sampling_params import SamplingParams
from router.snapshot import RoutingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedGeneration:
    """`requests` has one entry per prompt, each standing for `params.n` choices.

    Choice `c` of prompt `p` has index `p * n + c` in the answer.
    """

    response_id: str
    model: str
    requests: tuple[GenerationRequest, ...]
    params: SamplingParams
    stream: bool = False
    include_usage: bool = False
    echoes: tuple[str, ...] = ()
    """Text put before the answer of each prompt, or empty."""
    echoes_logprobs: bool = False
    """The echo has log-probabilities, as many as the answer."""
    num_prompt_logprobs: int | None = None
    """Alternatives in the answer's own list of the prompt's log-probabilities (an extension); None leaves the list out."""
    is_prompt_only: bool = False
    """Zero tokens were asked for: the prompt is checked and echoed, nothing runs."""
    created_s: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.params.n

    def echo(self, index: int) -> str:
        """Text that comes before the answer of choice `index`."""
        return self.echoes[index // self.params.n] if self.echoes else ""

    def prompt_ids(self, index: int) -> tuple[int, ...]:
        """The prompt of choice `index`."""
        return self.requests[index // self.params.n].prompt_ids


def routing_request(model: str, request: GenerationRequest, *, block_size: int, weights_version: str, num_choices: int) -> RoutingRequest:
    """What the router needs to know of a prompt: its size and the keys of its full blocks, unless none may be reused.

    Whoever computes log-probabilities of a prompt computes it from its first token on, and goes on alone.
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
        deadline_s=request.deadline_s,
        arrival_s=request.arrival_s,
        attempt=request.attempt,
        is_whole=request.wants_prompt_logprobs or request.ends_with_its_first_token,
    )
