"""A sampling state with the tokens that a request would own."""

from __future__ import annotations

from replicas.request import GenerationRequest
from replicas.sampling.sampling_state import SamplingState
from replicas.sampling_params import SamplingParams


class GrowingState(SamplingState):
    """With the list of tokens that a request would own."""

    def __init__(self, request, eos, mask):
        self.tokens = [*request.prompt_ids, *request.output_ids]
        super().__init__(request, self.tokens, eos, mask)

    def append(self, token_id):
        self.tokens.append(token_id)
        self.follow(token_id)


def state(seed=0, choice=0, prompt=(), output=(), eos=(), mask=None, **settings_):
    request = GenerationRequest(
        request_id="r", prompt_ids=tuple(prompt), output_ids=tuple(output), params=SamplingParams(**settings_), seed=seed, choice=choice
    )
    return GrowingState(request, frozenset(eos), mask)
