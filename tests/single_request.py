"""A trace of one request, made by hand."""

from __future__ import annotations

from dataclasses import replace

from kvcache.hashing import CacheIdentity, block_keys
from router.simulator.traces import HASH_BLOCK_TOKENS, TraceRequest


def single_request(num_prompt_tokens: int, num_output_tokens: int) -> TraceRequest:
    """It arrives at once; nothing came before it. Blocks of 512 tokens."""
    request = TraceRequest(
        request_id="single",
        arrival_s=0.0,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        runs=tuple(range(-(-num_prompt_tokens // HASH_BLOCK_TOKENS))),
        block_keys=(),
        num_new_tokens=num_prompt_tokens,
    )
    return replace(request, block_keys=tuple(block_keys(CacheIdentity(), request.prompt_ids(), HASH_BLOCK_TOKENS)))
