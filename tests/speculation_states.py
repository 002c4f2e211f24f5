"""Requests as a proposer sees them, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.hashing import CacheIdentity
from kvcache.prefix_cache import BlockKeyChain
from replicas.request import GenerationRequest
from replicas.sampling_params import SamplingParams
from replicas.scheduling.request_state import RequestState


def new_state(
    prompt_ids: Sequence[int], output_ids: Sequence[int] = (), *, name: str = "a", predicted_ids: Sequence[int] = (), **fields: object
) -> RequestState:
    request = GenerationRequest(
        request_id=name,
        prompt_ids=tuple(prompt_ids),
        output_ids=tuple(output_ids),
        params=SamplingParams(),
        seed=0,
        predicted_ids=tuple(predicted_ids),
        **fields,
    )
    return RequestState(request, arrival_number=0, chain=BlockKeyChain(CacheIdentity(), 4), max_num_tokens=4096)
